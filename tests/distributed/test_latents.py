# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks that gather latents train like one process (fp64), and send what the formulas say."""

from typing import Any

import pytest

import torchtitan_lr.training.register  # noqa: F401
from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.parity_runs import TINY, degrees, largest_difference, model, use_float64
from tests.support.rank_pool import RankPool
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.step_traffic import step_traffic

EXACT = 1e-12
GATES = ["--low_rank.lax_gate=scalar"]
SEQUENCE = ["--parallelism.tp_comm=sequence", "--activation_checkpoint.mode=low_rank"]
UNGROUPED = ["--parallelism.no_tp_grouping", "--parallelism.tp_norm=sync"]
OPERATORS = [
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
]


def latents(ranks: int) -> list[str]:
    return [f"--parallelism.context_parallel_degree={ranks}", "--parallelism.cp_gather=latents"]


CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "svd, FSDP": ("svd", [*degrees(local_batch=4), *latents(2), *OPERATORS], []),
    "cola, four ranks": ("cola", [*degrees(), *latents(4)], []),
    "cola, BTP": ("cola", [*degrees(tensor=2), *latents(2)], []),
    "cola, BTP ungrouped": ("cola", [*degrees(tensor=2), *latents(2), *UNGROUPED], []),
    "lax, BTP by sequence": ("lax", [*degrees(tensor=2), *latents(2), *SEQUENCE], GATES),
}
"""Family, layout, and what the reference has too."""


MORE = ("cola, BTP",)  # ungrouped, and by sequence, it has more messages


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in MORE), *nightly(*MORE)])
def test_layouts(name: str, four_ranks: RankPool, reference: Any) -> None:
    family, layout, common = CASES[name]
    arguments = [*model(family), *layout, *common]
    run = four_ranks.run(train, [*arguments, "--metrics.comm_ledger"])[0]
    assert largest_difference(run, reference(*model(family), *common)) < EXACT

    config = build_job_config([*TINY, *arguments])
    use_float64(config)
    paper = read_run(config, 4)
    dtypes = {role: name.replace("float32", "float64") for role, name in paper.wire_dtypes.items()}
    table = compare(run["ledger"], step_traffic(paper, 0), dtypes)
    assert differences(table) == []
    assert {row["mesh_dim"] for row in table} >= {"cp", "fsdp"}
