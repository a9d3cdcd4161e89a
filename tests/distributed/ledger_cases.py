# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One pass of a tensor-parallel case under the ledger, and what the formulas say of it."""

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from tests.distributed.tp_cases import compile_last_block
from tests.support.parity_cases import (
    BATCH,
    TOKENS,
    Case,
    build_model,
    model_args,
    shard_model,
    tp_mesh,
)
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.tp_messages import model_traffic
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.parallel.data_parallel import sum_gradients
from torchtitan_lr.parallel.recompute import apply_low_rank_checkpoint

N = BATCH * TOKENS


def build(case: Case, *changes: str) -> Any:
    """Build this rank's model with tensor parallelism and, in this order, some changes."""

    model = build_model(case, shard_model(case))
    for change in changes:
        if change.startswith("low_rank"):
            apply_low_rank_checkpoint(model, save_attention="attention" in change)
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
