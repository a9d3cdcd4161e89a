# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What TSR-Adam sends in a few steps: counted on a rank, and by the formulas."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests.distributed import tsr_cases
from tests.distributed.tsr_cases import COLUMN, DEFAULTS, Case, build_model, place, take_step
from torchtitan_lr.costs.tsr_messages import TSRMatrix, TSRMesh, tsr_traffic
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.optim.tsr import algorithm, refresh
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.optim.tsr.selection import BUCKET_ELEMENTS, TSRSettings, plan_matrices

Shapes = dict[str, tuple[int, ...]]

MESHES = {
    "replicate4": TSRMesh({}, replicas=4),
    "hsdp2x2": TSRMesh({"fsdp": 2}, replicas=2),
    "fsdp2xtp2": TSRMesh({"fsdp": 2, "tp": 2}),
    "tp2xdp2": TSRMesh({"tp": 2}, replicas=2),
}
STEPS = 6


def measure(
    layout_name: str,
    settings: TSRSettings,
    shapes: Shapes,
    half: bool = False,
    bucket: int = BUCKET_ELEMENTS,
) -> list[dict[Any, tuple[int, int]]]:
    """Count a few steps; on a rank. Each is {(op, mesh_dim, dtype): (calls, elements)}."""
    with (
        patch.object(tsr_cases, "SHAPES", shapes),
        # The verdict's all-reduce is not the optimizer's; any norm will do.
        patch.object(tsr_cases, "sum_over_ranks", lambda share: share),
        patch.object(algorithm, "BUCKET_ELEMENTS", bucket),
        patch.object(refresh, "BUCKET_ELEMENTS", bucket),
    ):
        case = Case(layout_name, settings, dtype=torch.float32, microbatches=2)
        layout = place(layout_name)
        model = build_model(layout, case.dtype)
        optimizer = TSROptimizers(
            *([model], settings, DEFAULTS),
            replicas=layout.replicas,
            stages=layout.stages,
            wire_dtype=torch.bfloat16 if half else None,
        )
        tsr = optimizer.gradients
        groups = dict(tsr.groups.sharding)
        if layout.replicas is not None:
            groups["dp_replicate"] = layout.replicas
        ledger = CommLedger([], groups)
        steps = []
        for step in range(STEPS):
            ledger.clear()
            with ledger:
                take_step(model, optimizer, layout, case, step)
            steps.append(
                {
                    (row["op"], row["mesh_dim"], row["dtype"]): (row["calls"], row["elements"])
                    for row in ledger.rows()
                }
            )
        return steps


def splits(name: str, transposed: bool, mesh: TSRMesh) -> dict[str, tuple[str, ...]]:
    by_dim: dict[int, list[str]] = {0: [], 1: []}
    if "fsdp" in mesh.sharding:
        by_dim[0].append("fsdp")
    if "tp" in mesh.sharding:
        by_dim[1 if name.endswith(COLUMN) else 0].append("tp")
    rows, columns = (1, 0) if transposed else (0, 1)
    return {"rows": tuple(by_dim[rows]), "columns": tuple(by_dim[columns])}


def expected(
    settings: TSRSettings, mesh: TSRMesh, shapes: Shapes, half: bool = False
) -> list[dict[Any, tuple[int, int]]]:
    chosen = plan_matrices(shapes, settings)
    plans = {name: chosen[name] for name in reversed(shapes) if name in chosen}
    matrices = {
        name: TSRMatrix(
            # The test's own width: the plan's is what is to be checked.
            replace(
                p,
                width=min(p.rank + settings.oversampling, p.rows, p.columns),
            ),
            **splits(name, p.transposed, mesh),
        )
        for name, p in plans.items()
    }
    dense = []
    for name, shape in reversed(shapes.items()):
        if name not in plans:
            parts = [d for d in mesh.sharding if d == "fsdp" or len(shape) == 2]
            size = torch.Size(shape).numel()
            dense.append(size // torch.Size([mesh.sharding[d] for d in parts]).numel())
    dtypes = {
        "core": "float32",
        "gradient": "float32",
        "sketch": "float32",
        "checksum": "int64",
    }
    steps = []
    done = dict.fromkeys(plans, 0)
    for t in range(STEPS):
        due = [i for i, (n, p) in enumerate(plans.items()) if p.is_due(t, done[n])]
        for i in due:
            done[list(plans)[i]] += 1
        rows: dict[Any, tuple[int, int]] = {}
        for row in tsr_traffic(list(matrices.values()), due, dense, mesh, settings):
            rounds = half and row.mesh_dim == "dp_replicate" and row.role != "checksum"
            key = (row.op, row.mesh_dim, "bfloat16" if rounds else dtypes[row.role])
            calls, elements = rows.get(key, (0, 0))
            rows[key] = (calls + row.calls, elements + row.elements)
        steps.append(rows)
    return steps
