# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A non-finite loss stops the run, naming step, rank and checkpoint."""

import re

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import degrees, model
from tests.support.rank_pool import RankPool

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


def test_a_sum_of_finite_gradients_is_no_ranks_fault(four_ranks: RankPool) -> None:
    where = "in a sum over the ranks of finite gradients, rank 1: layers.1.ffn_norm.weight"
    errors = four_ranks.errors(train, [*ACCUMULATED, "--training.steps=2"], "nan_sum@2")
    assert all(f"gradient norm is nan ({where})" in error for error in errors)
