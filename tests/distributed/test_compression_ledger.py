# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Messages of compressed gradients on four ranks: the ledger's count against the oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.compression_cases import CASES, Case, layout
from tests.oracle import compression as oracle
from tests.support.rank_pool import RankPool
from tests.unit.tiny import build_tiny
from torchtitan_lr.compression.units import COMPRESSORS, apply_gradient_compression
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.parallel.data_parallel import (
    round_on_the_wire,
    sum_gradients,
    synchronize_gradients,
)


def ledger_differences(case: Case, compressed: bool = True) -> tuple[list[Any], int, int]:
    """Compare one counted step of a small model with the oracle; count bytes sent and saved."""
    torch.manual_seed(0)
    model = build_tiny("full")
    meshes = layout(case.hsdp)
    for unit in (model.tok_embeddings, *model.layers.values(), model.output, model):
        fully_shard(unit, mesh=meshes["fsdp"])
    sum_gradients(model)
    name = "dp_replicate" if case.hsdp else "fsdp"
    if compressed:
        apply_gradient_compression(model, meshes[name], case.settings(), all_reduce=case.hsdp)
    if case.codec.half:
        round_on_the_wire(model)
    groups = {n: meshes[n].get_group() for n in ("fsdp", "dp_replicate")}
    ledger = CommLedger([model], groups)
    with ledger:
        for micro in range(case.microbatches):
            synchronize_gradients([model], micro == case.microbatches - 1)
            tokens = torch.arange(32).view(2, 16) % 96
            cross_entropy_sum(model(tokens), tokens).backward()
    units = {"embedding": model.tok_embeddings, "head": model.output}
    units |= {f"block {n}": block for n, block in model.layers.items()}
    rows = [
        row
        for row in ledger.rows()
        if row["mesh_dim"] == name and (row["op"], row["dtype"]) != ("all_gather", "float32")
    ]
    if case.hsdp:
        rows = [row for row in ledger.rows() if row["mesh_dim"] == name]
    sent = sum(row["bytes"] for row in rows)
    if not compressed and case.hsdp:
        # What a hook gets to sum over the replicas: the shards that FSDP2 has reduced.
        reduced = [row["bytes"] for row in ledger.rows() if row["op"] == "reduce_scatter"]
        sent = sum(reduced) // 2
    if not compressed:
        return [], sent, 0
    expected = [row for scope, unit in units.items() for row in predicted(unit, case, scope)]
    expected += predicted(model, case, "head")
    values = "bfloat16" if case.codec.half else "float32"
    table = compare(rows, expected, {"gradient": values, "index": "uint8"})
    assert any(row["calls"] for row in table)
    saved = sum(COMPRESSORS[unit].bytes_saved for unit in (*units.values(), model))
    return differences(table), sent, saved


def predicted(unit: nn.Module, case: Case, scope: str) -> list[Traffic]:
    """What the oracle says of one FSDP unit, from the sizes of its tensors' shards."""
    spans = COMPRESSORS[unit].spans
    chosen = sum(span.size for span in spans if span.compressed)
    dense = sum(span.size for span in spans) - chosen
    return oracle.exchange_rows(case.codec, case.ranks, chosen, dense, scope, case.hsdp)


LEDGER = {
    name: replace(case, min_size=1000) for name, case in CASES.items() if "sticks" not in name
}


def all_ledger_differences() -> dict[str, tuple[list[Any], int, int, int]]:
    found, whole = {}, {}
    for name, case in LEDGER.items():
        own = case.hsdp, case.codec.half
        if own not in whole:
            # FSDP2's own reduction communicates in every micro-batch, a compressed one in the last.
            dense = replace(case, microbatches=1)
            whole[own] = ledger_differences(dense, compressed=False)[1]
        found[name] = (*ledger_differences(case), whole[own])
    return found


@pytest.fixture(scope="module")
def ledgers(four_ranks: RankPool) -> dict[str, tuple[list[Any], int, int, int]]:
    return four_ranks.run(all_ledger_differences)[0]


@pytest.mark.parametrize("name", LEDGER)
def test_the_ledger_counts_what_the_oracle_says(name: str, ledgers: dict[str, Any]) -> None:
    wrong, measured, saved, whole = ledgers[name]
    assert wrong == []
    assert saved == whole - measured != 0
