# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one step of a run, from the formulas, and beside what the ledger measured.

The scalars of the ledger's scope ``step`` are left out, except an optimizer's. With a pipeline that
always reshards, weight gathers count once per pass, although each micro-batch repeats them.
"""

from collections import Counter, defaultdict
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
from torchtitan_lr.costs.described_run import Run, blocks_of, read_run
from torchtitan_lr.costs.messages import Traffic, backward, forward, merge, sent_bytes
from torchtitan_lr.costs.rehearsal import Rehearsal
from torchtitan_lr.ledger.ledger import COUNTS, STEP, reading_order
from torchtitan_lr.models.configured import llama_args
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.parallel.plans import PLANS
from torchtitan_lr.parallel.stages import stage_boundaries


def step_traffic(run: Run, pp_rank: int, rehearsal: Rehearsal | None = None) -> list[Traffic]:
    """Return a rank's traffic in an ordinary step; with a rehearsal, also what it sends again."""
    units = run.units_of(pp_rank)
    passes = run.tp_messages + _context(run, pp_rank) + _stage_messages(run, pp_rank)
    if rehearsal is not None:
        for stage in run.stages_of(pp_rank):
            in_halves = run.splits_backward and stage > 0
            for block in blocks_of(run.stages[stage]):
                passes += rehearsal.repeated(block, in_halves)
    rows, count = [], run.rounds
    for row in passes:
        if row.scope in units or row.mesh_dim == "pp":
            rows.append(replace(row, calls=count * row.calls, elements=count * row.elements))
    return [*rows, *_data(run, pp_rank), *run.optimizer.traffic(pp_rank)]


def _context(run: Run, pp_rank: int) -> list[Traffic]:
    """Return a pipeline rank's traffic of context parallelism in a micro-batch.

    C ranks share every row: each has n = b·s/C tokens, and gathers of all C·n tokens (Llama 3,
    section 3.3.2) k and v, 2·d_kv/T numbers each, or in a low-rank model the latents σ(A_k x) and
    σ(A_v x), 2r numbers, from which it computes k and v. Backward gathers them once more, and
    reduce-scatters their gradient. Latents send less while r < d_kv/T.
    """
    if run.cp == 1:
        return []
    width = run.args.rank_attention
    if run.gather == "kv":
        splits = run.tp > 1 and PLANS[run.settings.plan].shards_heads
        width = run.args.kv_dim // (run.tp if splits else 1)
    both = [2 * run.cp * run.tokens * width]  # in one message
    rows = []
    for block in blocks_of(run.units_of(pp_rank)):
        place = "activation", f"block {block}", "cp"
        rows += [make("all_gather", both, *place) for make in (forward, backward)]
        rows.append(backward("reduce_scatter", both, *place))
    return rows


def boundaries_of(run: Run) -> list[int]:
    """Return the elements per sequence that a rank sends over each stage boundary."""
    boundaries = stage_boundaries(run.config, run.args, run.seq_len // run.cp, run.settings)
    return [prod(boundary.shape) for boundary in boundaries]


def _stage_messages(run: Run, pp_rank: int) -> list[Traffic]:
    """Return a micro-batch's messages over each boundary i, between the stages i and i + 1."""
    stages, rows = run.stages_of(pp_rank), []
    for index, sequence in enumerate(boundaries_of(run) if run.pp > 1 else ()):
        sends = index in stages
        if sends == (index + 1 in stages):
            continue  # not this rank's, or the turn of a V-shaped schedule, where both are
        there, back = ("send", "recv") if sends else ("recv", "send")
        size, place = [run.microbatch * sequence], ("activation", f"boundary {index}", "pp")
        rows += [forward(there, size, *place), backward(back, size, *place)]
    return rows


def _data(run: Run, pp_rank: int) -> list[Traffic]:
    """Return what data-parallel ranks send in a step: weights, and gradients but an optimizer's.

    In every micro-batch, FSDP2 gathers a unit's weights for forward (and again for backward if they
    are resharded) and reduce-scatters its gradients. BOOST (Table 6) counts those of the linears,
    L(11dr + 3·d_ff·r) elements; these are of all parameters, padded to the ranks. Sums over
    replicas, and a codec's exchanges, run only in the last micro-batch.
    """
    rows, passes = [], run.accumulation
    crossed = "dp_replicate" if run.replicas > 1 else "fsdp"
    exchanges = exchanged_units(run) if run.compresses else {}
    for name, parameters in run.units_of(pp_rank).items():
        scope = "head" if name == "root" else name
        piece = sum(prod(run.piece(parameter)) for parameter in parameters)
        if run.shard > 1:
            gathers = [run.shard * piece] * passes
            place = "parameter", scope, "fsdp"
            rows.append(forward("all_gather", gathers, *place))
            # The head is the first unit in backward.
            always = run.config.parallelism.fsdp_reshard_after_forward == "always"
            if always if name == "head" else run.reshards:
                rows.append(backward("all_gather", gathers, *place))
            if not run.compresses or crossed != "fsdp":
                sums = gathers[:1] if run.compresses else gathers
                rows.append(backward("reduce_scatter", sums, "gradient", scope, "fsdp"))
        if run.compresses:
            codec = run.compression.codec
            for op, role, size in exchange_traffic(exchanges[name], codec, run.replicas > 1):
                rows.append(backward(op, [size], role, scope, crossed))
        elif run.replicas > 1 and not (run.entry.sums_replicas or run.outer.every):
            rows.append(backward("all_reduce", [piece], "gradient", scope, "dp_replicate"))
    return merge(rows)


def averaged(run: Run, pp_rank: int, rows: Iterable[Traffic]) -> list[Traffic]:
    """Return a step's rows with what optimizers send in an average step."""
    others = [row for row in rows if row.pass_ != "optimizer"]
    return others + run.optimizer.mean_traffic(pp_rank) + run.outer.mean_traffic(pp_rank)


def exchanged_units(run: Run) -> dict[str, Unit]:
    """Return the compressed exchange of every FSDP unit, by its name."""
    settings, units = run.compression, {}
    for name, parameters in run.stages[0].items():
        entries = {True: 0, False: 0}
        for parameter in parameters:
            chosen = is_compressed(parameter, prod(run.global_shapes[parameter]), settings)
            entries[chosen] += prod(run.piece(parameter))
        exchanged = exchange_unit(settings.codec, entries[True], entries[False], run.replicas > 1)
        units[name] = exchanged
    return units


def bytes_by_dim(rows: Iterable[Traffic], dtypes: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Sum bytes by mesh dimension and operation; ``dtypes`` as in `element_size`."""
    result: dict[str, dict[str, int]] = defaultdict(Counter)
    for row in rows:
        result[row.mesh_dim][row.op] += sent_bytes([row], dtypes)
    return dict(result)


def gradient_bytes(run: Run, pp_rank: int) -> int:
    """Return what a mean step's gradients take between data-parallel ranks; cores are gradients."""
    roles = ("gradient", "index", "core", "sketch", "basis", "outer")
    rows = averaged(run, pp_rank, _data(run, pp_rank))
    own = [row for row in rows if row.role in roles and row.mesh_dim != "tp"]
    return sent_bytes(own, run.wire_dtypes)


def sent_per_step(config: Any, world: int) -> dict[str, int]:
    """Return the bytes of gradients of a mean step of pipeline rank 0, and AdamW's, by formula.

    A run without a formula, or whose ranks share no gradients, has none.
    """
    if ENTRIES[config.optimizer.name].cost is None or llama_args(config) is None:
        return {}
    run = read_run(config, world)
    baseline = gradient_bytes(replace(run, baseline=True), 0)
    if not baseline:
        return {}
    return {"sent_bytes": gradient_bytes(run, 0), "adamw_bytes": baseline}


IDENTITY = ("scope", "pass", "op", "mesh_dim", "dtype")  # the keys that identify a row
EXPECTED = ("expected_calls", "expected_elements")


def compare(
    rows: Iterable[Mapping[str, Any]], expected: Iterable[Traffic], dtypes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Put the ledger's rows and formulas side by side.

    Rows get ``expected_calls`` and ``expected_elements``: 0 where no formula predicts the calls,
    None in `STEP`, which has none. Calls that were predicted only have rows of 0.
    """
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for measured in rows:
        stated = None if measured["scope"] == STEP else 0
        identity = tuple(measured[key] for key in IDENTITY)
        table[identity] = dict(measured) | dict.fromkeys(EXPECTED, stated)
    for row in expected:
        identity = (row.scope, row.pass_, row.op, row.mesh_dim, dtypes[row.role])
        unsent = dict(zip(IDENTITY, identity, strict=True)) | dict.fromkeys((*COUNTS, *EXPECTED), 0)
        found = table.setdefault(identity, unsent)
        found["expected_calls"] += row.calls
        found["expected_elements"] += row.elements
    return sorted(table.values(), key=reading_order)


def differences(table: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of a comparison whose measurement differs from the formula."""
    stated = [row for row in table if row["expected_calls"] is not None]
    return [row for row in stated if any(row[n] != row[f"expected_{n}"] for n in COUNTS[:2])]
