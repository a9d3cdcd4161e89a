# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one step of a run, from the formulas.

The scalars of the ledger's scope ``step`` are left out, except TSR-Adam's. With a pipeline that
always reshards, weight gathers count once per pass, although each micro-batch repeats them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import lcm, prod
from typing import Any

import torch

from torchtitan_lr.compression.settings import is_compressed
from torchtitan_lr.compression.sizes import FORMULAS, Unit, exchange_traffic, exchange_unit
from torchtitan_lr.config.schema import BUILT_IN_OPTIMIZERS
from torchtitan_lr.costs.context_messages import context_traffic
from torchtitan_lr.costs.described_run import Run, blocks_of, read_run, with_wire
from torchtitan_lr.costs.fsdp_messages import data_parallel_traffic
from torchtitan_lr.costs.gram_messages import SpectralMatrix, spectral_traffic
from torchtitan_lr.costs.messages import Traffic, merge, pipeline_traffic
from torchtitan_lr.costs.rehearsal import Rehearsal
from torchtitan_lr.costs.tp_messages import model_traffic
from torchtitan_lr.costs.tsr_messages import TSRMatrix, TSRMesh, tsr_traffic
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.tsr.selection import MatrixPlan
from torchtitan_lr.parallel.pipeline import stage_boundaries


def step_traffic(run: Run, pp_rank: int, rehearsal: Rehearsal | None = None) -> list[Traffic]:
    """Return a rank's traffic in a step without TSR-Adam refreshes."""
    model = _here(run, pp_rank, model_traffic(run.args, run.settings, run.tp, run.tokens))
    model += run_context_traffic(run, pp_rank, run.gather)
    rows = _times(model, run.microbatches * run.accumulation)
    rows += _data(run, pp_rank)
    if run.pp > 1:
        boundaries, stages = boundaries_of(run), run.stages_of(pp_rank)
        messages = pipeline_traffic(boundaries, stages, run.microbatch, run.microbatches)
        rows += _times(messages, run.accumulation)
    if rehearsal is not None:
        count = blocks_of(run.units_of(pp_rank)) * run.microbatches * run.accumulation
        for (op, dtype), (calls, size) in rehearsal.repeated.items():
            numbers = round(calls * count), round(size * count)
            rows.append(repeated_row(run, "blocks", op, dtype, *numbers))
    if run.tsr is not None:
        rows += optimizer_traffic(run, pp_rank, ())
    if run.spectral:
        rows += spectral_traffic(run.spectral, spectral_matrices(run, pp_rank), run.ranks)
    return rows


def run_context_traffic(run: Run, pp_rank: int, gather: str) -> list[Traffic]:
    """Return a pipeline rank's traffic of context parallelism in a micro-batch."""
    rows = context_traffic(run.args, run.settings, run.tp, run.cp, run.tokens, gather)
    return _here(run, pp_rank, rows)


def element_size(row: Traffic, dtypes: Mapping[str, str]) -> int:
    """Return the bytes per element of a row."""
    role = row.role
    if row.pass_ == "optimizer" and row.mesh_dim == "dp_replicate":
        own = {"gradient": "stored", "core": "replicas", "sketch": "replicas"}
        role = own.get(role, role)
    dtype: torch.dtype = getattr(torch, dtypes[role])
    return dtype.itemsize


def bytes_by_dim(rows: Iterable[Traffic], dtypes: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Sum bytes by mesh dimension and operation; ``dtypes`` as in `element_size`."""
    result: dict[str, dict[str, int]] = {}
    for row in rows:
        ops = result.setdefault(row.mesh_dim, {})
        ops[row.op] = ops.get(row.op, 0) + row.elements * element_size(row, dtypes)
    return result


WIRES = ("float32", "bfloat16")  # values of ``training.mixed_precision_reduce``


def gradient_bytes(run: Run, pp_rank: int, optimizer: Iterable[Traffic] = ()) -> dict[str, int]:
    """Return what the gradients of a step take between data-parallel ranks, by dtype on the wire.

    TSR-Adam's cores and sketches are gradients too. A codec that cannot round has no bf16.
    """
    rounds = not run.compresses or FORMULAS[run.compression.codec.name].rounds
    found = {}
    for wire in WIRES if rounds else ("float32",):
        other = with_wire(run, wire)
        rows = [*_data(other, pp_rank), *(row for row in optimizer if row.mesh_dim != "tp")]
        found[wire] = sum(
            row.elements * element_size(row, other.wire_dtypes)
            for row in rows
            if row.role in ("gradient", "index", "core", "sketch")
        )
    return found


def sent_per_step(config: Any, world: int) -> dict[str, int]:
    """Return the bytes of gradients of a mean step of pipeline rank 0, and AdamW's, by formula.

    A run without a formula, or whose ranks share no gradients, has none.
    """
    wire = config.training.mixed_precision_reduce
    if config.optimizer.name not in BUILT_IN_OPTIMIZERS:
        return {}
    try:
        run = read_run(config, world)
    except ConfigError:  # a family from outside
        return {}
    cores = [] if run.tsr is None else average_optimizer_traffic(run, 0)
    baseline = gradient_bytes(replace(run, baseline=True), 0)[wire]
    if not baseline:
        return {}
    sent = gradient_bytes(run, 0, cores)
    # A codec that cannot round sends fp32.
    return {"sent_bytes": sent.get(wire, sent["float32"]), "adamw_bytes": baseline}


def _times(rows: Iterable[Traffic], count: int) -> list[Traffic]:
    return [replace(row, calls=count * row.calls, elements=count * row.elements) for row in rows]


def _here(run: Run, pp_rank: int, rows: Iterable[Traffic]) -> list[Traffic]:
    """Return the rows of a pipeline rank's modules."""
    scopes = set(run.units_of(pp_rank))
    return [row for row in rows if row.scope in scopes]


def repeated_row(run: Run, scope: str, op: str, dtype: str, calls: int, elements: int) -> Traffic:
    """Return a row of a repeated collective; an fp32 one in a bf16 run is the norm's statistic."""
    wide = "float32" if run.precision.compute < 4 else ""
    role = "statistic" if dtype == wide else "activation"
    return Traffic(scope, "backward", op, role, calls, elements)


def boundaries_of(run: Run) -> list[int]:
    """Return the elements per sequence that a rank sends over each stage boundary."""
    boundaries = stage_boundaries(run.config, run.args, run.seq_len // run.cp, run.settings)
    return [prod(boundary.shape) for boundary in boundaries]


def _data(run: Run, pp_rank: int) -> list[Traffic]:
    replicas = 1 if run.sums_replicas else run.replicas
    uncompressed = data_parallel_traffic(
        run.args,
        run.settings,
        run.tp,
        replicas,
        run.shard,
        run.reshards,
        run.config.parallelism.fsdp_reshard_after_forward == "always",
        run.accumulation,
        run.by_columns,
    )
    if not run.compresses:
        return _here(run, pp_rank, uncompressed)
    # The gradients' rows become the codec's, sent only in the last micro-batch.
    crossed = "dp_replicate" if run.replicas > 1 else "fsdp"
    rows = []
    for row in uncompressed:
        if row.role != "gradient":
            rows.append(row)
        elif row.mesh_dim != crossed:
            k = run.accumulation
            rows.append(replace(row, calls=row.calls // k, elements=row.elements // k))
    codec = run.compression.codec
    for scope, unit in exchanged_units(run):
        rows += [
            Traffic(scope, "backward", op, role, 1, elements, crossed)
            for op, role, elements in exchange_traffic(unit, codec, run.replicas > 1)
        ]
    return _here(run, pp_rank, merge(rows))


def exchanged_units(run: Run) -> list[tuple[str, Unit]]:
    """Return the scope and the compressed exchange of every FSDP unit."""
    settings, units = run.compression, []
    for name, parameters in run.stages[0].items():
        entries = {True: 0, False: 0}
        for parameter, shape in parameters.items():
            chosen = is_compressed(parameter, prod(run.global_shapes[parameter]), settings)
            entries[chosen] += prod(run.piece(parameter, shape))
        unit = exchange_unit(
            settings.codec, entries[True], entries[False], settings.ranks, run.replicas > 1
        )
        units.append(("head" if name == "root" else name, unit))
    return units


def optimizer_traffic(run: Run, pp_rank: int, refreshing: Collection[int]) -> list[Traffic]:
    """Return TSR-Adam's traffic in a step; `refreshing` are indices into `tsr_names`."""
    assert run.tsr is not None
    sharding = {name: run.mesh[name].size for name in ("fsdp", "tp") if run.mesh[name].size > 1}
    shapes = run.shapes_of(pp_rank)
    matrices = [_matrix(run, name, shapes[name]) for name in tsr_names(run, pp_rank)]
    dense = [
        prod(run.piece(name, shape))
        for name, shape in reversed(shapes.items())
        if name not in run.tsr_plans
    ]
    mesh = TSRMesh(sharding, run.replicas)
    return tsr_traffic(matrices, refreshing, dense, mesh, run.tsr)


def tsr_names(run: Run, pp_rank: int) -> list[str]:
    """Return the names of a rank's compressed matrices, in the order of backward."""
    return [name for name in reversed(run.shapes_of(pp_rank)) if name in run.tsr_plans]


def average_optimizer_traffic(run: Run, pp_rank: int) -> list[Traffic]:
    """Return TSR-Adam's traffic per step, averaged over its refreshes and rounded."""
    plans = [run.tsr_plans[name] for name in tsr_names(run, pp_rank)]
    if not plans:
        return optimizer_traffic(run, pp_rank, ())
    steps = lcm(*{plan.interval for plan in plans})
    times: Counter[tuple[int, ...]] = Counter()  # of the matrices that refresh together
    for step in range(steps):
        due = tuple(i for i, plan in enumerate(plans) if step % plan.interval == plan.offset)
        times[due] += 1
    rows = []
    for due, count in times.items():
        for row in optimizer_traffic(run, pp_rank, due):
            rows.append(replace(row, calls=row.calls * count, elements=row.elements * count))
    return [
        replace(row, calls=round(row.calls / steps), elements=round(row.elements / steps))
        for row in merge(rows)
    ]


def peak_optimizer_traffic(run: Run, pp_rank: int) -> tuple[list[Traffic], list[Traffic]]:
    """Return TSR-Adam's traffic in the first step, and in the later step that sends most bytes."""
    plans = [run.tsr_plans[name] for name in tsr_names(run, pp_rank)]
    steps = lcm(*{plan.interval for plan in plans})
    first = _due(plans, 0, 0)
    later_due = {_due(plans, step, 1) for step in range(1, steps + 1)}
    later = [optimizer_traffic(run, pp_rank, due) for due in later_due]

    def sent(rows: list[Traffic]) -> int:
        return sum(row.elements * element_size(row, run.wire_dtypes) for row in rows)

    return optimizer_traffic(run, pp_rank, first), max(later, key=sent)


def _due(plans: list[MatrixPlan], step: int, after: int) -> tuple[int, ...]:
    """Return the places of the matrices that refresh at a step (`MatrixPlan.is_due`)."""
    return tuple(i for i, plan in enumerate(plans) if plan.is_due(step, after))


def _matrix(run: Run, name: str, local: tuple[int, ...]) -> TSRMatrix:
    plan, splits = run.tsr_plans[name], _splits(run, name, local)
    rows, columns = (1, 0) if plan.transposed else (0, 1)
    return TSRMatrix(plan, splits[rows], splits[columns])


def spectral_matrices(run: Run, pp_rank: int) -> list[SpectralMatrix]:
    """Return the matrices of a rank that a spectral optimizer updates."""
    shapes, matrices = run.shapes_of(pp_rank), []
    for name in run.spectral_vectors:
        if name in shapes:  # else another pipeline rank has it
            splits = _splits(run, name, shapes[name])
            matrices.append(SpectralMatrix.of(name, run.global_shapes[name], splits))
    return matrices


def _splits(run: Run, name: str, local: tuple[int, ...]) -> list[tuple[str, ...]]:
    """Return the mesh dimensions that split each dimension of a matrix."""
    whole, splits = run.global_shapes[name], []
    for dim in (0, 1):
        by_fsdp = run.shard > 1 and dim == int(name in run.by_columns)
        names = ["fsdp"] if by_fsdp else []
        names += ["tp"] if local[dim] != whole[dim] else []
        splits.append(tuple(names))
    return splits
