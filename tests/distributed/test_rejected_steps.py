# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A non-finite number stops the run, naming step, rank and checkpoint, or skips the step.

The rank that the others wait for is named, too.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.training import small_trainer, spoil_last_block, train
from tests.support.parity_runs import degrees, model
from tests.support.rank_pool import RankPool
from tests.support.recorded_passes import recorded
from tests.support.support_matrix import NONE, SupportMatrix
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.training import history
from torchtitan_lr.training.verdict import Origin

MATRIX = SupportMatrix()
FSDP = dict.fromkeys(MATRIX.axes, NONE) | {"family": "cola", "data": "fsdp"}

FSDP4 = [
    *("--training.local_batch_size=2", "--training.steps=3"),
    *("--checkpoint.enable", "--checkpoint.interval=2"),
]


def test_nan_loss_stops_with_step_rank_and_checkpoint(four_ranks: RankPool) -> None:
    message = (
        r"NonFiniteError: step 3: loss of rank 1 is not finite; "
        r"last good checkpoint: .*/checkpoint/step-2"
    )
    assert all(re.search(message, error) for error in four_ranks.errors(train, FSDP4, "nan@3"))


ACCUMULATED = degrees(local_batch=1)
PIPELINE = [*degrees(pipeline=2, local_batch=2), "--parallelism.data_parallel_shard_degree=2"]
CONTEXT = [*degrees(local_batch=2), "--parallelism.context_parallel_degree=2"]
TENSOR = degrees(tensor=2, local_batch=2)


@pytest.mark.parametrize(
    ("layout", "fault", "what"),
    [
        # Rank 1 has the first stage's last block, and its neighbour in the pipeline the loss.
        (PIPELINE, "nan_block", "output of block 0 of rank 1"),
        # The other rank of its row attends to what it has made in the block behind.
        (CONTEXT, "nan_block", "output of block 0 of rank 1"),
        # Tensor-parallel ranks have the same loss, but parameters of their own.
        (TENSOR, "nan_block", "loss of one of the ranks 0, 1"),
        (TENSOR, "nan_weight", "parameter layers.1.attention.wo.B.weight of rank 1"),
    ],
    ids=["pipeline", "context", "tensor", "weight"],
)
def test_the_rank_whose_forward_made_a_nan_is_named(
    layout: list[str], fault: str, what: str, four_ranks: RankPool
) -> None:
    options = [*model("cola"), *layout, "--training.steps=2"]
    message = f"NonFiniteError: step 2: {what} is not finite; last good"
    errors = four_ranks.errors(train, options, f"{fault}@2")
    assert all(message in error for error in errors), errors


@pytest.mark.parametrize(
    ("layout", "named"),
    # Tensor-parallel ranks wait for one another within a block: the first stands for both.
    [(TENSOR, 0), (PIPELINE, 1)],
    ids=["tensor", "stages"],
)
def test_the_slowest_rank_is_named(layout: list[str], named: int, four_ranks: RankPool) -> None:
    """By what it computes: all take the same time for a step."""
    options = [*model("cola"), *layout, "--training.steps=2"]
    folder = four_ranks.run(train, options, "slow@2")[0]["dump_folder"]
    record = history.read_history(Path(folder) / history.HISTORY_FILE)[-1]
    assert record["step"] == 2 and record[history.SLOWEST_RANK] == named
    assert record[history.SLOWEST_BEHIND] > 60  # of .1 s, where blocks take milliseconds


@pytest.mark.parametrize(
    ("layout", "fault", "what"),
    [
        (
            ACCUMULATED,
            "nan_sum",
            "gradient norm is nan (only in the sum over the ranks, or not again when the step was "
            "repeated: layers.1.ffn_norm.weight)",
        ),
        (PIPELINE, "nan_once", "a loss is not finite, but all were when the step was repeated"),
    ],
    ids=["gradient", "loss"],
)
def test_what_does_not_come_again_is_no_ranks_fault(
    layout: list[str], fault: str, what: str, four_ranks: RankPool
) -> None:
    errors = four_ranks.errors(train, [*layout, "--training.steps=2"], f"{fault}@2")
    assert all(f"NonFiniteError: step 2: {what}; last good" in error for error in errors), errors


@contextmanager
def spoilt_sum(trainer: Any) -> Iterator[None]:
    """Make a gradient NaN behind the passes, once: a replay runs no hook."""
    finish, first = trainer.gradients.finish_sums, iter([True])

    def spoilt() -> Any:
        if next(first, False):
            local_part(trainer.model_parts[0].tok_embeddings.weight.grad).fill_(math.nan)
        return finish()

    with patch.object(trainer.gradients, "finish_sums", spoilt):
        yield


def skipped(arguments: list[str], repeats: bool, captures: bool) -> dict[str, Any]:
    """Take six steps, of which the fifth is rejected; return what they leave on this rank."""
    given = ["--training.max_skipped_steps=1", "--training.steps=6", "--metrics.log_freq=9"]
    found: dict[str, Any] = {"losses": []}
    captured = []
    with ExitStack() as stack:
        if not repeats:
            stack.enter_context(patch.object(Origin, "of", lambda *_: ("NaN", None)))
        if captures:
            stack.enter_context(recorded())
        trainer = stack.enter_context(small_trainer([*arguments, *given]))
        batches = iter(trainer.dataloader)
        for trainer.step in range(1, 7):
            spoilt = spoilt_sum(trainer) if captures else spoil_last_block(trainer.model_parts)
            with spoilt if trainer.step == 5 else nullcontext():
                trainer.train_step(batches)
            found["losses"].append(trainer.loss.item())
            captured.append(len(trainer.graph.passes) if captures else 0)
            # TSR-Adam takes no gradient before its next step begins.
            assert getattr(trainer.gradients, "_running", None) is None
        assert trainer.skipped_steps == 1
        # The graphs' memory was free while the step ran again.
        assert captured == [0, 0, captures, captures, captures and not repeats, captures]
        weights = trained_parameters(*trainer.model_parts).values()
        found["weights"] = [local_part(weight).detach().clone() for weight in weights]
        compressors = trainer._residuals.compressors
        found["exchanges"] = [compressor.exchanges for compressor in compressors]
        found["residuals"] = [compressor.residual.clone() for compressor in compressors]
    return found


@pytest.mark.parametrize(
    ("combination", "captures"),
    [
        (FSDP | {"codec": "sketch"}, False),
        (FSDP | {"data": "replicas", "optimizer": "tsr"}, False),
        (FSDP, True),
    ],
    ids=["tagc", "tsr", "captured"],
)
def test_a_step_that_ran_again_leaves_nothing(
    combination: dict[str, str], captures: bool, two_ranks: RankPool
) -> None:
    arguments = MATRIX.arguments(combination)
    runs = (two_ranks.run(skipped, arguments, repeats, captures) for repeats in (True, False))
    for again, once in zip(*runs, strict=True):
        torch.testing.assert_close(again, once, rtol=0, atol=0, equal_nan=True)
        assert all(weight.isfinite().all() for weight in once["weights"])
        assert bool(once["exchanges"]) is (combination["codec"] != NONE)
