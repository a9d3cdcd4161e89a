# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Messages of compressed gradients on four ranks: the ledger's count against the formulas."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.compression_cases import CASES, Case, layout
from tests.support.rank_pool import RankPool
from tests.unit.tiny import build_tiny
from torchtitan_lr.compression.fsdp import apply_gradient_compression, compressor_of
from torchtitan_lr.compression.sizes import CodecSizes
from torchtitan_lr.formulas.compression import (
    Exchange,
    all_reduce_traffic,
    reduce_scatter_traffic,
    replicated,
)
from torchtitan_lr.formulas.traffic import Traffic
from torchtitan_lr.ledger.comparison import compare, differences
from torchtitan_lr.ledger.ledger import CommLedger, mesh_dims_of
from torchtitan_lr.models.loss import cross_entropy_sum
from torchtitan_lr.parallel.data_parallel import sum_gradients, synchronize_gradients


def ledger_differences(case: Case) -> tuple[list[Any], int, int]:
    """Compare one counted step of a small model with the formulas; count bytes and parameters."""
    torch.manual_seed(0)
    model = build_tiny("full")
    meshes = layout(case.hsdp)
    for unit in (model.tok_embeddings, *model.layers.values(), model.output, model):
        fully_shard(unit, mesh=meshes["fsdp"])
    sum_gradients(model)
    name = "dp_replicate" if case.hsdp else "fsdp"
    apply_gradient_compression(model, meshes[name], case.settings(), all_reduce=case.hsdp)
    ledger = CommLedger([model], mesh_dims_of({n: meshes[n] for n in ("fsdp", "dp_replicate")}))
    with ledger:
        for micro in range(case.microbatches):
            synchronize_gradients([model], micro == case.microbatches - 1)
            tokens = torch.arange(32).view(2, 16) % 96
            cross_entropy_sum(model(tokens), tokens).backward()
    units = {"embedding": model.tok_embeddings, "head": model.output}
    units |= {f"block {n}": block for n, block in model.layers.items()}
    expected = [row for scope, unit in units.items() for row in predicted(unit, case, scope, name)]
    expected += predicted(model, case, "head", name)
    rows = [
        row
        for row in ledger.rows()
        if row["mesh_dim"] == name and (row["op"], row["dtype"]) != ("all_gather", "float32")
    ]
    if case.hsdp:
        rows = [row for row in ledger.rows() if row["mesh_dim"] == name]
    table = compare(rows, expected, {"gradient": "float32", "index": "uint8"})
    assert any(row["calls"] for row in table)
    saved = sum(compressor_of(unit).bytes_saved() for unit in (*units.values(), model))
    return differences(table), sum(row["bytes"] for row in rows), saved


def predicted(unit: nn.Module, case: Case, scope: str, mesh_dim: str) -> list[Traffic]:
    """What the formulas say of one FSDP unit, from the sizes of its tensors' shards."""
    spans = compressor_of(unit).spans
    chosen = sum(span.size for span in spans if span.compressed)
    entries = (chosen, sum(span.size for span in spans) - chosen)
    if case.hsdp:
        shared = replicated(*entries, case.ranks, case.codec)
        return all_reduce_traffic(shared, case.codec, scope, mesh_dim)
    return reduce_scatter_traffic(Exchange(case.ranks, *entries), case.codec, scope, mesh_dim)


def dense(case: Case) -> Case:
    """The layout of a case with every codec's baseline."""
    return Case(CodecSizes("dense"), case.hsdp, case.microbatches, min_size=1000)


LEDGER = {
    name: replace(case, min_size=1000) for name, case in CASES.items() if "sticks" not in name
} | {"sketch_sum1": Case(CodecSizes("sketch", 4, 0.96, "sum1"), min_size=1000)}


def all_ledger_differences() -> dict[Case, tuple[list[Any], int, int]]:
    cases = {*LEDGER.values(), *map(dense, LEDGER.values())}
    return {case: ledger_differences(case) for case in sorted(cases, key=str)}


@pytest.fixture(scope="module")
def ledgers(four_ranks: RankPool) -> dict[Case, tuple[list[Any], int, int]]:
    return four_ranks.run(all_ledger_differences)[0]


@pytest.mark.parametrize("name", LEDGER)
def test_the_ledger_counts_what_the_formulas_say(name: str, ledgers: dict[Case, Any]) -> None:
    wrong, measured, saved = ledgers[LEDGER[name]]
    assert wrong == []
    _, whole, nothing = ledgers[dense(LEDGER[name])]
    assert nothing == 0 and saved == whole - measured


def test_a_formula_that_is_off_by_one_is_noticed(four_ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="assert"):
        four_ranks.run(ledger_with_wrong_formula)


def ledger_with_wrong_formula() -> None:
    with patch("torchtitan_lr.formulas.compression.verdict_bytes", lambda m: 1 + m // 8):
        assert ledger_differences(replace(CASES["sketch"], min_size=1000))[0] == []
