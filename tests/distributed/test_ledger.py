# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the ledger counts on four ranks is what the formulas say, row by row."""

import json
from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.ledger_cases import build, count, disagreements, expected, measure
from tests.support.nightly import nightly
from tests.support.parity_cases import (
    Case,
    covering,
    model_args,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.commands import measure_comm
from torchtitan_lr.commands.main import main
from torchtitan_lr.costs.fsdp_messages import data_parallel_traffic
from torchtitan_lr.ledger.ledger import COUNTS
from torchtitan_lr.parallel.plan_parts import TPSettings

BTP = [
    TPSettings("btp", grouping, norm, comm)
    for grouping in (True, False)
    for norm in ("online", "sync")
    for comm in ("all_reduce", "sequence")
]
CASES = [
    *covering([Case("cola", settings) for settings in BTP]),
    *[
        Case(family, TPSettings(plan, grouping), gqa=gqa)
        for plan in ("vanilla", "vanilla_replicated")
        for grouping in (True, False)
        for family, gqa in (("cola", False), ("svd", True))
    ],
    *[Case("full", TPSettings("megatron", comm=comm)) for comm in ("all_reduce", "sequence")],
    *[
        Case("lax", TPSettings(plan, comm=comm), gate="scalar", gqa=False)
        for plan, comm in (("btp", "all_reduce"), ("btp", "sequence"), ("vanilla", "all_reduce"))
    ],
    Case("cola", TPSettings("btp", loss_parallel=False)),
    Case("cola", TPSettings("btp"), degree=2),
    Case("cola", TPSettings("btp"), dtype=torch.bfloat16),
]


def measure_all(cases: list[Case]) -> list[list[dict[str, Any]]]:
    return [measure(case) for case in cases]


@pytest.fixture(scope="module")
def measured(four_ranks: RankPool) -> dict[Case, list[list[dict[str, Any]]]]:
    ranks = four_ranks.run(measure_all, CASES)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ledger_equals_formula(case: Case, measured: dict[Case, Any]) -> None:
    first = measured[case][0]
    assert disagreements(first, expected(case), case) == []
    assert all(rank == first for rank in measured[case])


def measure_compiled(case: Case) -> list[list[dict[str, Any]]]:
    """A compiled block under a ledger that sees its compilation, and under a later one."""
    model = build(case, "compile_last")
    return [count(model, case) for _ in range(2)]


def test_compiled_blocks_are_counted(two_ranks: RankPool) -> None:
    case = Case("cola", TPSettings("btp"), degree=2, dtype=torch.float32)
    for rows in two_ranks.run(measure_compiled, case)[0]:
        assert disagreements(rows, expected(case), case) == []


@pytest.mark.parametrize(
    ("plan", "compiled"),
    [("btp", False), ("vanilla", False), *nightly(("btp", True), ("vanilla", True))],
)
def test_fsdp_belongs_to_its_parameters(plan: str, compiled: bool, four_ranks: RankPool) -> None:
    case = Case("cola", TPSettings(plan), degree=2, dtype=torch.float32)
    changes = ("compile_last", "fsdp") if compiled else ("fsdp",)
    rows = four_ranks.run(measure, case, *changes)[0]
    weights = data_parallel_traffic(model_args(case), case.settings, case.degree, 1, 2)
    assert disagreements(rows, expected(case) + weights, case) == []


def test_command(
    four_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a real step of the trainer: every row agrees, and has the promised keys."""
    step = partial(four_ranks.run, measure_comm.measure)
    monkeypatch.setattr(measure_comm, "run_on_ranks", lambda _, arguments, __: step(arguments)[0])
    monkeypatch.setenv("NGPU", "4")
    # Checkpointing that repeats collectives.
    options = ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    assert main(["measure-comm", "debug_lax", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    numbers = {*COUNTS, "most_overlapped_flops", "expected_calls", "expected_elements"}
    assert all(row.keys() == {"scope", "pass", "op", "mesh_dim", "dtype"} | numbers for row in rows)
    assert {row["scope"] for row in rows} == {"embedding", "block", "head", "step"}
    assert {row["mesh_dim"] for row in rows if row["scope"] == "block"} == {"fsdp", "tp"}
