# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The estimate of a run as a dictionary and as a text table."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torchtitan_lr.costs.described_run import Run, with_wire
from torchtitan_lr.costs.gather_choice import GIB, gather_lines, gather_report
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.rank_memory import checkpoint_bytes, in_flight, rank_memory, rehearse_run
from torchtitan_lr.costs.rehearsal import Rehearsal
from torchtitan_lr.costs.step_time import fp32_seconds, step_time
from torchtitan_lr.costs.step_traffic import WIRES, bytes_by_dim, gradient_bytes, step_traffic
from torchtitan_lr.costs.work import work_of_run
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.parallel.recompute import EAGER_MODES

OWN = "counts as AdamW does, without what it sends itself"
"""What an estimate says of an optimizer from outside the package."""


def estimate(runs: Mapping[str, Run | ConfigError], hardware: Hardware) -> dict[str, Any]:
    """Estimate runs that are compared: the first is that of the report, others are alternatives.

    Memory is of the rank that needs most, bytes of the pipeline rank that sends most, checkpoints
    and tokens/s of all ranks. Where an optimizer's steps differ, ``comm_bytes`` are those of an
    ordinary one, ``gradient_bytes`` and the time of an average one.
    """
    (name, first), *others = runs.items()
    assert isinstance(first, Run)
    columns: dict[str, Any] = {}
    with _quiet():
        report = _estimate(first, hardware, every_mode=True)
        for other, run in others:
            if isinstance(run, ConfigError):
                columns[other] = {"refused": str(run)}
            else:
                columns[other] = _estimate(run, hardware, every_mode=False)
    return {"name": name, "hardware": hardware.name, **report, "alternatives": columns}


def _estimate(run: Run, hardware: Hardware, every_mode: bool) -> dict[str, Any]:
    rehearsal = rehearse_run(run)
    traffic = [step_traffic(run, p, rehearsal) for p in range(run.pp)]
    ranks = [_pipeline_rank(run, p, rehearsal, traffic[p]) for p in range(run.pp)]
    heaviest = max(ranks, key=lambda rank: int(rank["memory_bytes"]["peak"]))
    busiest = max(ranks, key=lambda rank: _total(rank["comm_bytes"]))
    averaged = []
    for pp_rank, rows in enumerate(traffic):
        passes = [row for row in rows if row.pass_ != "optimizer"]
        averaged.append(passes + run.optimizer.mean_traffic(pp_rank))
    time = step_time(run, averaged, hardware, work_of_run(run))
    tokens_per_s = run.tokens_per_step / time.total
    parameters, flops = run.args.get_nparams_and_flops(empty_model(run.args), run.seq_len)
    report = {
        "world": run.world,
        "checkpointing": run.checkpointing,
        "parameters": parameters,
        "flops_per_token": flops,
        "memory_bytes": heaviest["memory_bytes"],
        "comm_bytes": busiest["comm_bytes"],
        "gradient_bytes": gradient_bytes(run, busiest["rank"]),
        "checkpoint_bytes": checkpoint_bytes(run),
        "step_time": asdict(time) | {"total": time.total, "tokens_per_s": tokens_per_s},
    }
    name, kinds = run.entry.name, run.optimizer.kinds_of_steps(busiest["rank"])
    if kinds:
        report["kinds_of_steps"] = _kinds_of_steps(run, kinds)
    if run.optimizer.small_flops(busiest["rank"])[0]:
        report["of_matrices"] = _of_matrices(run, busiest["rank"], hardware)
    if run.entry.cost is None:
        report["own_optimizer"] = name
    if run.cp > 1:
        report["context"] = gather_report(run, busiest["rank"], hardware)
    if run.pp > 1:
        report["pipeline_ranks"] = ranks
    if every_mode:
        report["activations_by_mode"] = _by_mode(run, heaviest["rank"], rehearsal)
    return report


def _pipeline_rank(
    run: Run, pp_rank: int, rehearsal: Rehearsal, traffic: list[Traffic]
) -> dict[str, Any]:
    units = run.units_of(pp_rank)
    return {
        "rank": pp_rank,
        "stages": run.stages_of(pp_rank),
        "units": list(units),
        "microbatches_in_flight": in_flight(run, pp_rank, rehearsal)[1],
        "memory_bytes": rank_memory(run, pp_rank, rehearsal),
        "comm_bytes": bytes_by_dim(traffic, run.wire_dtypes),
    }


def _by_mode(run: Run, pp_rank: int, own: Rehearsal) -> dict[str, dict[str, int]]:
    """Return the bytes saved for backward, and backward's working memory, by checkpointing mode."""
    result = {}
    for mode in dict.fromkeys((*EAGER_MODES, run.checkpointing)):
        if mode == "low_rank" and not run.args.low_rank:
            continue
        rehearsal = own if mode == run.checkpointing else rehearse_run(run, mode)
        kept, _ = in_flight(run, pp_rank, rehearsal)
        result[mode] = {"kept": kept, "working": rehearsal.working}
    return result


def _kinds_of_steps(run: Run, kinds: Mapping[str, list[Traffic]]) -> dict[str, Any]:
    """Return an optimizer's bytes by kind of step, dtype of gradients, dimension and operation."""
    found: dict[str, Any] = {name: {} for name in kinds}
    for wire in WIRES:
        dtypes = with_wire(run, wire).wire_dtypes
        for name, traffic in kinds.items():
            found[name][wire] = bytes_by_dim(traffic, dtypes)
    return {"name": run.entry.name, "bytes": found}


def _of_matrices(run: Run, pp_rank: int, hardware: Hardware) -> dict[str, Any]:
    """Return the numbers that an optimizer of matrices sends, and its products of (r, r)."""
    sent = dict.fromkeys(("summed", "returned", "gathered"), 0)
    for row in run.optimizer.traffic(pp_rank):
        if row.role == "gram":
            sent["returned" if row.op == "all_gather" else "summed"] += row.elements
        elif row.role == "momentum":
            sent["gathered"] += row.elements
    whole, own = run.optimizer.small_flops(pp_rank)
    return {
        "name": run.entry.name,
        "numbers": sent,
        "small_flops": whole,
        "small_flops_per_rank": own,
        "small_seconds": fp32_seconds(own, hardware),
    }


def _total(comm_bytes: dict[str, dict[str, int]]) -> int:
    return sum(size for ops in comm_bytes.values() for size in ops.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages of the models that a rehearsal builds."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def as_text(report: dict[str, Any], hardware: Hardware) -> str:
    """Format the report as a table with one column per plan."""
    refused = {n: c["refused"] for n, c in report["alternatives"].items() if "refused" in c}
    columns = {report["name"]: report}
    columns |= {n: c for n, c in report["alternatives"].items() if n not in refused}
    width = max(16, 2 + max(map(len, columns)))
    lines = [f"{report['hardware']:44}" + "".join(f"{name:>{width}}" for name in columns)]
    for name, cells in _rows(list(columns.values())):
        lines.append(f"{name:44}" + "".join(f"{cell:>{width}}" for cell in cells))
    lines += ["", "activations by checkpointing mode: kept + at work in backward (GiB)"]
    for mode, sizes in report["activations_by_mode"].items():
        lines.append(f"  {mode:14}{sizes['kept'] / GIB:10,.2f} +{sizes['working'] / GIB:8,.2f}")
    for rank in report.get("pipeline_ranks", []):
        lines.append(_rank_line(rank))
    if "context" in report:
        lines += gather_lines(report["context"])
    kinds = report.get("kinds_of_steps", {"bytes": {}})
    for kind, by_wire in kinds["bytes"].items():
        sizes = [f"{_total(dims) / GIB:,.3f} in {wire}" for wire, dims in by_wire.items()]
        lines.append(f"{kinds['name']}, {kind} step (GiB): {', '.join(sizes)}")
    if "of_matrices" in report:
        lines.append(_matrices_line(report["of_matrices"]))
    lines += [f"{name}: {reason}" for name, reason in refused.items()]
    for name, column in columns.items():
        if "own_optimizer" in column:
            lines.append(f"{name}: {column['own_optimizer']} {OWN}")
        if column["memory_bytes"]["peak"] > hardware.memory_gib * GIB:
            lines.append(f"{name}: does not fit into {hardware.memory_gib:g} GiB")
    return "\n".join(lines)


def _matrices_line(cost: dict[str, Any]) -> str:
    millions = {kind: f"{count / 1e6:,.1f} M" for kind, count in cost["numbers"].items()}
    return (
        f"{cost['name']}, per step: {millions['summed']} numbers of Gram matrices summed, "
        f"{millions['returned']} of Q returned, {millions['gathered']} of momenta gathered; "
        f"{cost['small_flops_per_rank'] / 1e12:.2f} of {cost['small_flops'] / 1e12:.2f} TFLOP of "
        f"r x r products in fp32 on each rank, {1e3 * cost['small_seconds']:.1f} ms (modelled)"
    )


def _rows(columns: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    yield "ranks", [f"{c['world']:,}" for c in columns]
    yield "activation checkpointing", [c["checkpointing"] for c in columns]
    yield "parameters (M)", [f"{c['parameters'] / 1e6:,.1f}" for c in columns]
    yield "GFLOP per token", [f"{c['flops_per_token'] / 1e9:,.3f}" for c in columns]
    for part in columns[0]["memory_bytes"]:
        yield f"{part} (GiB per rank)", [_number(c["memory_bytes"][part] / GIB) for c in columns]
    sent: set[tuple[str, str]] = set()
    for column in columns:
        for dim, sizes_by_op in column["comm_bytes"].items():
            sent.update((dim, op) for op in sizes_by_op)
    for dim, op in sorted(sent):
        sizes = [c["comm_bytes"].get(dim, {}).get(op, 0) for c in columns]
        yield f"{dim} {op} (GiB per step)", [_number(size / GIB) for size in sizes]
    for wire in WIRES:
        cells = []
        for column in columns:
            size = column["gradient_bytes"].get(wire)
            cells.append("-" if size is None else _number(size / GIB))
        yield f"gradients, if in {wire} (GiB per step)", cells
    sizes = [sum(c["checkpoint_bytes"].values()) for c in columns]
    yield "checkpoint (GiB, all ranks)", [_number(size / GIB) for size in sizes]
    for part in columns[0]["step_time"]:
        speed = part == "tokens_per_s"
        name = "tokens/s (all ranks, modelled)" if speed else f"{part} (s, modelled)"
        yield name, [_number(c["step_time"][part]) for c in columns]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def _rank_line(rank: dict[str, Any]) -> str:
    blocks = sum(name.startswith("block") for name in rank["units"])
    ends = [name for name in rank["units"] if not name.startswith("block")]
    return (
        f"pipeline rank {rank['rank']}: stages {rank['stages']}, {blocks} blocks"
        f"{''.join(f', {name}' for name in ends)}; {rank['microbatches_in_flight']} micro-batches "
        f"in flight, {rank['memory_bytes']['peak'] / GIB:,.2f} GiB, "
        f"{_total(rank['comm_bytes']) / GIB:,.3f} GiB sent"
    )
