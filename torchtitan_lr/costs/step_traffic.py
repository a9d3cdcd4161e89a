# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one step of a run, from the formulas.

The scalars of the ledger's scope ``step`` are left out, except an optimizer's. With a pipeline that
always reshards, weight gathers count once per pass, although each micro-batch repeats them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torchtitan_lr.compression.settings import (
    Unit,
    exchange_traffic,
    exchange_unit,
    is_compressed,
)
from torchtitan_lr.costs.context_messages import context_traffic
from torchtitan_lr.costs.described_run import Run, read_run, with_wire
from torchtitan_lr.costs.fsdp_messages import data_parallel_traffic
from torchtitan_lr.costs.messages import Traffic, element_size, merge, pipeline_traffic
from torchtitan_lr.costs.rehearsal import Rehearsal
from torchtitan_lr.costs.tp_messages import model_traffic
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.parallel.recompute import wrapping_period
from torchtitan_lr.parallel.stages import stage_boundaries


def step_traffic(run: Run, pp_rank: int, rehearsal: Rehearsal | None = None) -> list[Traffic]:
    """Return a rank's traffic in an ordinary step of its optimizer."""
    model = _here(run, pp_rank, model_traffic(run.args, run.settings, run.tp, run.tokens))
    model += run_context_traffic(run, pp_rank, run.gather)
    rows = _times(model, run.microbatches * run.accumulation)
    rows += _data(run, pp_rank)
    if run.pp > 1:
        boundaries, stages = boundaries_of(run), run.stages_of(pp_rank)
        messages = pipeline_traffic(boundaries, stages, run.microbatch, run.microbatches)
        rows += _times(messages, run.accumulation)
    if rehearsal is not None:
        for stage in run.stages_of(pp_rank):
            in_halves = run.splits_backward and stage > 0
            again = rehearsal.repeated_in_halves if in_halves else rehearsal.repeated
            count = _periods_of(run, stage) * run.microbatches * run.accumulation
            for what, (calls, elements) in again.items():
                rows.append(repeated_row(run, "blocks", *what, calls * count, elements * count))
    return rows + run.optimizer.traffic(pp_rank)


def run_context_traffic(run: Run, pp_rank: int, gather: str) -> list[Traffic]:
    """Return a pipeline rank's traffic of context parallelism in a micro-batch."""
    rows = context_traffic(run.args, run.settings, run.tp, run.cp, run.tokens, gather)
    return _here(run, pp_rank, rows)


def bytes_by_dim(rows: Iterable[Traffic], dtypes: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Sum bytes by mesh dimension and operation; ``dtypes`` as in `element_size`."""
    result: dict[str, dict[str, int]] = {}
    for row in rows:
        ops = result.setdefault(row.mesh_dim, {})
        ops[row.op] = ops.get(row.op, 0) + row.elements * element_size(row, dtypes)
    return result


WIRES = ("float32", "bfloat16")  # values of ``training.mixed_precision_reduce``


def gradient_bytes(run: Run, pp_rank: int) -> dict[str, int]:
    """Return what a mean step's gradients take between data-parallel ranks, by dtype on the wire.

    Cores and sketches are gradients too. A codec that cannot round has no bf16.
    """
    optimizer = run.optimizer.mean_traffic(pp_rank)
    rounds = not run.compresses or run.compression.codec.can_round
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
    if ENTRIES[config.optimizer.name].cost is None:
        return {}
    try:
        run = read_run(config, world)
    except ConfigError:  # a family from outside
        return {}
    baseline = gradient_bytes(replace(run, baseline=True), 0)[wire]
    if not baseline:
        return {}
    sent = gradient_bytes(run, 0)
    # A codec that cannot round sends fp32.
    return {"sent_bytes": sent.get(wire, sent["float32"]), "adamw_bytes": baseline}


def _times(rows: Iterable[Traffic], count: int) -> list[Traffic]:
    return [replace(row, calls=count * row.calls, elements=count * row.elements) for row in rows]


def _here(run: Run, pp_rank: int, rows: Iterable[Traffic]) -> list[Traffic]:
    """Return the rows of a pipeline rank's modules."""
    scopes = set(run.units_of(pp_rank))
    return [row for row in rows if row.scope in scopes]


def repeated_row(
    run: Run, scope: str, dim: str, op: str, dtype: str, calls: int, elements: int
) -> Traffic:
    """Return a row of a repeated collective; an fp32 one in a bf16 run is the norm's statistic."""
    wide = "float32" if run.precision.compute < 4 else ""
    role = "statistic" if dtype == wide else "activation"
    return Traffic(scope, "backward", op, role, calls, elements, dim)


def _periods_of(run: Run, stage: int) -> int:
    """Count the blocks of a stage that end a period of checkpointing, which runs over the model."""
    period = wrapping_period(run.config.activation_checkpoint, run.checkpointing)
    blocks = [int(unit.split()[1]) for unit in run.stages[stage] if unit.startswith("block")]
    return sum((index + 1) % period == 0 for index in blocks)


def boundaries_of(run: Run) -> list[int]:
    """Return the elements per sequence that a rank sends over each stage boundary."""
    boundaries = stage_boundaries(run.config, run.args, run.seq_len // run.cp, run.settings)
    return [prod(boundary.shape) for boundary in boundaries]


def _data(run: Run, pp_rank: int) -> list[Traffic]:
    replicas = 1 if run.entry.sums_replicas else run.replicas
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
        unit = exchange_unit(settings.codec, entries[True], entries[False], run.replicas > 1)
        units.append(("head" if name == "root" else name, unit))
    return units
