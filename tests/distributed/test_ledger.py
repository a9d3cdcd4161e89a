# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the ledger counts on four ranks is what the formulas say, row by row."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.distributed.tp_cases import compile_last_block
from tests.integration import runs
from tests.support.nightly import nightly
from tests.support.parity_cases import (
    BATCH,
    TOKENS,
    Case,
    build_model,
    compile_blocks,
    covering,
    model_args,
    shard_model,
    tp_mesh,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.formulas.data_parallel import data_parallel_traffic
from torchtitan_lr.formulas.tensor_parallel import model_traffic
from torchtitan_lr.formulas.traffic import Traffic
from torchtitan_lr.ledger.comparison import compare, differences
from torchtitan_lr.ledger.ledger import COUNTS, CommLedger
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.parallel.data_parallel import sum_gradients
from torchtitan_lr.parallel.plans import TPSettings
from torchtitan_lr.parallel.recompute import apply_low_rank_checkpoint

N = BATCH * TOKENS


def build(case: Case, *changes: str) -> Any:
    """Build this rank's model with tensor parallelism and, in this order, some changes."""

    model = build_model(case, shard_model(case))
    for change in changes:
        if change.startswith("low_rank"):
            apply_low_rank_checkpoint(model, save_attention="attention" in change)
        elif change == "compile":
            compile_blocks(model, case)
        elif change == "compile_last":
            compile_last_block(model, case)
        elif change == "fsdp":
            shard_as_the_trainer(model, case)
    return model


def shard_as_the_trainer(model: Any, case: Case) -> None:
    """FSDP2 over the replicas; gradients are summed."""
    mesh = tp_mesh(case.degree)._get_root_mesh()["dp"]
    for unit in (model.tok_embeddings, *model.layers.values()):
        fully_shard(unit, mesh=mesh)
    fully_shard(model.output, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    sum_gradients(model)


def measure(case: Case, *changes: str) -> list[dict[str, Any]]:
    """Run forward and backward once on this rank under the ledger; call it on all ranks."""
    return count(build(case, *changes), case, split_recompute="split" in changes)


def count(model: Any, case: Case, split_recompute: bool = False) -> list[dict[str, Any]]:
    meshes = {"tp": tp_mesh(case.degree)}
    if case.degree < 4:
        meshes["fsdp"] = tp_mesh(case.degree)._get_root_mesh()["dp"]
    groups = {name: mesh.get_group() for name, mesh in meshes.items()}
    ledger = CommLedger([model], groups)
    with ledger:
        run(model)
    rows = ledger.rows(split_recompute=split_recompute)
    for row in rows:
        del row["overlapped_flops"]  # a compiler may order products otherwise: see test_overlap
    return rows


def run(model: Any) -> None:
    """Go forward and backward once."""
    generator = torch.Generator().manual_seed(3)
    size = (BATCH, TOKENS)
    tokens, labels = torch.randint(model.model_args.vocab_size, (2, *size), generator=generator)
    output = model.output
    if getattr(output.head, "loss_parallel", True):
        model(tokens, targets=labels).backward()
    else:
        cross_entropy_sum(model(tokens), labels).backward()


def expected(case: Case) -> list[Traffic]:
    settings = case.settings
    if settings.plan == "auto":
        settings = replace(settings, plan="megatron" if case.family == "full" else "btp")
    return model_traffic(model_args(case), settings, case.degree, N)


def disagreements(rows: list[dict[str, Any]], traffic: list[Traffic], case: Case) -> list[Any]:
    name = str(case.dtype).removeprefix("torch.")
    wide = "float64" if case.dtype == torch.float64 else "float32"
    roles = dict.fromkeys(("activation", "parameter", "gradient"), name)
    table = compare(rows, traffic, roles | {"statistic": wide, "loss": wide})
    assert any(row["calls"] for row in table)
    return list(differences(table))


BTP = [
    TPSettings("btp", grouping, norm, stat, comm, head)
    for grouping in (True, False)
    for norm, stat in (("online", "async"), ("online", "column"), ("sync", "async"))
    for comm in ("all_reduce", "sequence")
    for head in ("plain", "scatter")
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
    """Compiled blocks under a ledger that sees their compilation, and under a later one."""
    model = build(case, "compile")
    return [count(model, case) for _ in range(2)]


def test_compiled_blocks_are_counted(two_ranks: RankPool) -> None:
    case = Case("cola", TPSettings("btp"), degree=2, dtype=torch.float32)
    for rows in two_ranks.run(measure_compiled, case)[0]:
        assert disagreements(rows, expected(case), case) == []


@pytest.mark.parametrize(
    ("plan", "compiled"),
    [("btp", True), ("vanilla", False), *nightly(("btp", False), ("vanilla", True))],
)
def test_fsdp_belongs_to_its_parameters(plan: str, compiled: bool, four_ranks: RankPool) -> None:
    case = Case("cola", TPSettings(plan), degree=2, dtype=torch.float32)
    changes = ("compile_last", "fsdp") if compiled else ("fsdp",)
    rows = four_ranks.run(measure, case, *changes)[0]
    weights = data_parallel_traffic(model_args(case), case.settings, case.degree, 1, 2)
    assert disagreements(rows, expected(case) + weights, case) == []


def test_script() -> None:
    """On a real step of the trainer: every row agrees, and has the promised keys."""
    command = [sys.executable, "-m", "torchtitan_lr", "measure-comm", "debug_lax", "--json"]
    # Checkpointing that repeats collectives.
    options = ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    # It runs backward before it starts the ranks, and torch may refuse backward in forks of such a
    # process.
    done = runs.run([*command, *options], truly=True, NGPU="4")
    assert done.status == 0, done.everything
    rows = json.loads(done.out)
    numbers = {*COUNTS, "most_overlapped_flops", "expected_calls", "expected_elements"}
    assert all(row.keys() == {"scope", "pass", "op", "mesh_dim", "dtype"} | numbers for row in rows)
    assert {row["scope"] for row in rows} == {"embedding", "block", "head", "step"}
    assert {row["mesh_dim"] for row in rows if row["scope"] == "block"} == {"fsdp", "tp"}
