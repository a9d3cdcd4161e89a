# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Recorded passes give the eager ones' numbers under FSDP2 and every plan, bit for bit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.training import small_trainer, train
from tests.support.nightly import nightly
from tests.support.rank_pool import RankPool
from tests.support.recorded_passes import Recorder, recorded, trained
from tests.support.support_matrix import NONE, SupportMatrix, world_size

MATRIX = SupportMatrix()
TSR = ["--optimizer.tsr_overlap_buckets=1"]
TSR += [f"--optimizer.tsr_{name}refresh_interval=5" for name in ("", "embedding_")]
FSDP = {"data": "fsdp", "family": "cola"}
USUAL = [
    FSDP | {"accumulation": "twice", "precision": "bf16"},
    {"family": "lax", "tensor": "btp", "checkpointing": "low_rank"},
]
"""Combinations of docs/support_matrix.toml."""

OTHERS = [
    *(FSDP | {"family": family} for family in ("full", "svd", "lax_gated", "caat")),
    *(FSDP | {"optimizer": name} for name in ("muon", "spectron", "lora_muon")),
    *(FSDP | {"optimizer": name} for name in ("tsr", "tsr_one_sided")),
    *(FSDP | {"checkpointing": m} for m in ("full", "selective_op", "selective_block", "low_rank")),
    *({"family": "cola", "tensor": plan} for plan in MATRIX.axes["tensor"] if "btp" in plan),
    *({"family": "cola", "tensor": plan} for plan in ("vanilla", "vanilla_replicated")),
    *({"family": "full", "tensor": plan} for plan in ("megatron", "megatron_sequence")),
    {"family": "caat", "tensor": "caat"},
    *({"family": "cola", "context": how} for how in ("shared", "latents")),
    {"family": "cola", "data": "replicas", "accumulation": "twice"},
    {"family": "cola", "data": "hsdp", "accumulation": "twice", "precision": "bf16_wire"},
    {"family": "cola", "data": "replicas", "outer": "steps"},
    *({"family": "cola", "data": how, "optimizer": "tsr"} for how in ("replicas", "hsdp")),
    {"family": "cola", "data": "fsdp", "tensor": "btp", "accumulation": "twice"},
    *(
        {"family": "cola", "data": "fsdp", "tensor": plan}
        for plan in ("btp_sequence", "btp_ungrouped", "vanilla", "vanilla_replicated")
    ),
    *(
        {"family": "full", "data": "fsdp", "tensor": plan}
        for plan in ("megatron", "megatron_sequence")
    ),
    {"family": "caat", "data": "fsdp", "tensor": "caat"},
]


def results(arguments: list[str], captures: bool) -> tuple[list[torch.Tensor], int]:
    """What `trained` returns, of this rank."""
    given = [*arguments, "--training.steps=9", "--metrics.log_freq=100", "--optimizer.lr=1e-2"]
    with recorded("" if captures else "off"), small_trainer(given) as trainer:
        data = iter(trainer.dataloader)
        return trained(trainer, lambda step: data)


def name(combination: dict[str, str]) -> str:
    return "-".join(combination.values())


@pytest.mark.parametrize("combination", [*USUAL, *nightly(*OTHERS)], ids=name)
def test_captured_steps_equal_eager_ones(
    combination: dict[str, str], request: pytest.FixtureRequest
) -> None:
    whole: Any = dict.fromkeys(MATRIX.axes, NONE) | combination
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world_size(whole)])
    arguments = MATRIX.arguments(whole) + (TSR if "tsr" in name(combination) else [])
    eager, captured = (pool.run(results, arguments, captures) for captures in (False, True))
    for (ours, passes), (theirs, _) in zip(captured, eager, strict=True):
        assert passes == (2 if "accumulation" in combination else 1)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert not torch.equal(theirs[0], theirs[1])


def whole_run(dump: str, steps: int, captures: bool) -> tuple[list[float], int]:
    """Train to a step, from a checkpoint if there is one; return losses and captured passes."""
    options = ["--model.name=llama_cola", "--training.local_batch_size=2", "--checkpoint.enable"]
    options += ["--checkpoint.interval=4", "--lr_scheduler.total_steps=8"]
    with (
        recorded("" if captures else "off"),
        patch.object(Recorder, "__call__", autospec=True, side_effect=Recorder.__call__) as calls,
    ):
        run = train([*options, f"--training.steps={steps}"], "", dump)
    return run["losses"], calls.call_count


def test_captured_steps_go_on_from_a_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    eager, none = two_ranks.run(whole_run, str(tmp_path / "eager"), 8, False)[0]
    before, first = two_ranks.run(whole_run, str(tmp_path / "captured"), 4, True)[0]
    after, second = two_ranks.run(whole_run, str(tmp_path / "captured"), 8, True)[0]
    assert (none, first > 0, second > 0) == (0, True, True)
    assert after == eager and before == eager[:4]
