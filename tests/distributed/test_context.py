# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks that share the tokens of a row train like one process (fp64), and send what is stated."""

from typing import Any

import pytest

import torchtitan_lr.training.register  # noqa: F401
from tests.distributed.training import train
from tests.distributed.tsr_runs import TSR
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    DEEP,
    TINY,
    degrees,
    largest_difference,
    model,
    schedule,
    use_float64,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.step_traffic import step_traffic

EXACT = 1e-12
GATES = ["--low_rank.lax_gate=scalar"]
LANES = ["--caat.lanes=2", "--caat.sync_fraction=0.5"]
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
REPLICAS = ["--parallelism.data_parallel_replicate_degree=2"]
SEQUENCE = ["--parallelism.tp_comm=sequence"]
TWICE = ["--training.local_batch_size=2"]
VALIDATED = ["--validation.enable", "--validation.steps=2", "--validation.seq_len=8"]
SPARSE = ["--grad_compression.codec=sparse", "--grad_compression.level=custom"]
SPARSE += ["--grad_compression.theta=0"]  # sends everything
OPERATORS = "--activation_checkpoint.selective_ac_option=op"


def shared(degree: int = 2, **others: int) -> list[str]:
    return [*degrees(**others), f"--parallelism.context_parallel_degree={degree}"]


def plan(name: str) -> list[str]:
    return [*shared(tensor=2), f"--parallelism.tp_plan={name}"]


def recompute(mode: str, *options: str) -> list[str]:
    return [f"--activation_checkpoint.mode={mode}", *options]


CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "four ranks": ("lax", [*shared(4), *recompute("low_rank")], GATES),
    "FSDP, accumulated": ("cola", [*shared(local_batch=4), *TWICE], []),
    "lanes": ("full", [*shared(tensor=2), *recompute("selective", OPERATORS)], LANES),
    "replicas of TSR-Adam": ("cola", [*shared(local_batch=4), *REPLICAS], TSR),
    "a split backward": ("lax", [*shared(pipeline=2), *schedule("ZBVZeroBubble")], DEEP),
    "a spectral optimizer": ("cola", shared(tensor=2), ["--optimizer.name=LoRAMuon"]),
    "validated pipeline": ("cola", [*shared(pipeline=2), *schedule("1F1B")], VALIDATED),
}
MORE: dict[str, tuple[str, list[str], list[str]]] = {
    "vanilla": ("svd", [*plan("vanilla"), *recompute("full")], []),
    "Megatron by sequence": ("full", [*shared(tensor=2), *SEQUENCE], []),
    "BTP by sequence": ("lax", [*shared(tensor=2), *SEQUENCE, *recompute("low_rank")], GATES),
    "whole heads": ("svd", plan("vanilla_replicated"), []),
    "HSDP": ("svd", [*shared(local_batch=4), *REPLICAS], []),
    "lanes on one rank": ("full", [*shared(4), *recompute("selective")], LANES),
    "GPipe": ("lax", [*shared(pipeline=2), *schedule("GPipe")], []),
    "interleaved": ("cola", [*shared(pipeline=2), *schedule("Interleaved1F1B")], DEEP),
    "Muon": ("svd", shared(local_batch=4), ["--optimizer.name=Muon"]),
    "Spectron": ("lax", shared(4), ["--optimizer.name=Spectron"]),
    "compressed gradients": ("full", [*shared(local_batch=4), *SPARSE], ["--training.seq_len=64"]),
    "compiled": ("cola", [*shared(4), *COMPILED], []),
    "compiled BTP": ("cola", [*shared(tensor=2), *COMPILED, *recompute("low_rank")], []),
}


@pytest.mark.parametrize("name", [*CASES, *nightly(*MORE)])
def test_layouts(name: str, four_ranks: RankPool, reference: Any) -> None:
    family, layout, common = (CASES | MORE)[name]
    run = four_ranks.run(train, [*model(family), *layout, *common, "--metrics.comm_ledger"])[0]
    expected = reference(*model(family), *common)
    assert largest_difference(run, expected) < EXACT
    assert run["val_losses"] == pytest.approx(expected["val_losses"], rel=EXACT)
    assert run["tokens"] == expected["tokens"]
    check_counts(run, [*model(family), *layout, *common])


def check_counts(run: dict[str, Any], arguments: list[str]) -> None:
    """Compare what four ranks gathered with the formula, in every mode of checkpointing."""
    config = build_job_config([*TINY, *arguments])
    use_float64(config)
    paper = read_run(config, 4)
    dtypes = {role: name.replace("float32", "float64") for role, name in paper.wire_dtypes.items()}
    sent = [row for row in run["ledger"] if row["mesh_dim"] == "cp"]
    stated = [row for row in step_traffic(paper, 0) if row.mesh_dim == "cp"]
    assert sent and differences(compare(sent, stated, dtypes)) == []
