# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimates of runs that are compared, and of a run's layouts, as dictionaries and as text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torchtitan_lr.training.register  # noqa: F401  (registers our models)
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.layouts import GIB, Modelled, find_layouts, with_inputs
from torchtitan_lr.costs.memory import checkpoint_bytes, in_flight
from torchtitan_lr.costs.messages import sent_bytes
from torchtitan_lr.costs.rehearsal import rehearse_run
from torchtitan_lr.costs.step_time import communication_seconds
from torchtitan_lr.costs.step_traffic import bytes_by_dim, gradient_bytes
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.launch.placement import fit
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, resolve_settings

FULL_RANK = "full"  # the alternative that is a family; ``auto`` selects its plan

SHOWN = 10  # of a run's layouts, the fastest
_PARTS = {
    "compute": "products on fewer tokens or rows",
    "element_wise": "other kernels",
    "exposed_communication": "communication that nothing hides",
    "bubble": "the pipeline's idle time",
    "optimizer": "the optimizer on larger shards",
    "host": "the host, which launches its kernels",
}
"""Where a slower layout's time goes, by the parts of `StepTime`."""


def read_runs(
    configs: Mapping[str, str],  # TOML files by the names of their columns
    world: int | None,  # ranks, by default the least that a configuration needs
    plans: str,  # of one configuration, beside which it stands
    overrides: Sequence[str],
) -> dict[str, Run | ConfigError]:
    """Read the runs to compare, fitted to their ranks as in training, and check them."""
    runs: dict[str, Run | ConfigError] = {}
    for name, path in configs.items():
        runs[name] = first = read_first(path, world, overrides)
    if len(runs) > 1:
        return runs
    names, known = plans.split(","), [FULL_RANK, *PLANS]
    for plan in names:
        require(plan in known, "--plans", plan, one_of(known, plan))
    return {"as configured": first, **dict(alternatives(first, names))}


def read_first(path: str, world: int | None, overrides: Sequence[str]) -> Run:
    """Read and check one run, see `read_runs`."""
    arguments = [f"--job.config_file={path}", *overrides]
    config = build_job_config(arguments)
    ranks = least_ranks(vars(config.parallelism)) if world is None else world
    if fitted := fit(config, arguments, ranks):
        config = build_job_config([*arguments, *fitted])
    check_job_config(config, ranks, "cuda", data="paper")
    return read_run(config, ranks)


def alternatives(run: Run, plans: Sequence[str]) -> Iterator[tuple[str, Run | ConfigError]]:
    """Yield the run's model under plans, on the same ranks with the same batches and AdamW.

    Or there is the reason why a plan cannot have it. A full-rank model is compared with its
    flavor's CoLA model.
    """
    config, low = run.config, _low_rank(run)
    config = replace(config, parallelism=replace(config.parallelism, cp_gather="kv"))
    if FULL_RANK in plans and run.checkpointing == "low_rank":  # full rank has no latents to keep
        section = replace(config.activation_checkpoint, mode="full")
        config = replace(config, activation_checkpoint=section)
        check_job_config(config, run.world, "cuda", data="paper")
    dense = replace(low, family="full", rank_attention=0, rank_ffn=0, activation="fullrank")
    for name in plans:
        if name != FULL_RANK and not low.low_rank:
            continue
        plan, args = ("auto", dense) if name == FULL_RANK else (name, low)
        try:
            settings = resolve_settings(TPSettings(plan), args, run.tp, run.seq_len)
        except ConfigError as error:
            yield name, error
        else:
            yield name, Run(config, run.world, args, settings, baseline=True)


def _low_rank(run: Run) -> LlamaArgs:
    """Return the run's low-rank model without lanes, which these plans do not have."""
    args = replace(run.args, lanes=1, sync_fraction=1.0)
    cola, flavor = FLAVORS["cola"], run.config.model.flavor
    if args.low_rank or flavor not in tuple(cola):  # the file of a shape belongs to one family
        return args
    return replace(cola[flavor], max_seq_len=run.args.max_seq_len)


def estimate(runs: Mapping[str, Run | ConfigError], hardware: Hardware) -> dict[str, Any]:
    """Estimate runs that are compared, one in each of ``columns``.

    Memory and bytes are those of the ranks with most. Where an optimizer's steps differ,
    ``comm_bytes`` are of an ordinary one, ``gradient_bytes`` and the time of an average one.
    """
    columns: dict[str, Any] = {}
    for name, run in runs.items():
        if isinstance(run, ConfigError):
            columns[name] = {"refused": str(run)}
        else:
            columns[name] = _column(run, hardware)
    return {"hardware": hardware.name, "columns": columns}


def _column(run: Run, hardware: Hardware) -> dict[str, Any]:
    modelled = with_inputs(Modelled(run, hardware))
    run = modelled.run
    sent = [bytes_by_dim(rows, run.wire_dtypes) for rows in modelled.sent]
    busiest = max(range(run.pp), key=lambda rank: _total(sent[rank]))
    time = modelled.time
    tokens_per_s = run.tokens_per_step / time.total
    parameters, flops = run.size
    report: dict[str, Any] = {
        "world": run.world,
        "checkpointing": run.checkpointing,
        "keeps_inputs": run.keeps_inputs,
        "parameters": parameters,
        "flops_per_token": flops,
        "memory_bytes": max(modelled.memory, key=lambda parts: parts["peak"]),
        "comm_bytes": sent[busiest],
        "gradient_bytes": gradient_bytes(run, busiest),
        "checkpoint_bytes": checkpoint_bytes(run),
        "step_time": asdict(time) | {"total": time.total, "tokens_per_s": tokens_per_s},
        "kinds_of_steps": [],  # where they differ
    }
    kinds = run.optimizer.kinds_of_steps(busiest) | run.outer.kinds_of_steps(busiest)
    for kind, rows in kinds.items():
        took = communication_seconds(rows, run.wire_dtypes, run.mesh, hardware)
        numbers = {"bytes": sent_bytes(rows, run.wire_dtypes), "seconds": sum(took.values())}
        report["kinds_of_steps"].append({"kind": f"{run.entry.name}, {kind} step"} | numbers)
    if run.entry.cost is None:
        report["own_optimizer"] = run.entry.name
    if run.pp > 1:
        report["pipeline_ranks"] = [
            {
                "stages": run.stages_of(rank),
                "units": list(run.units_of(rank)),
                "microbatches_in_flight": in_flight(run, rank, rehearse_run(run))[1],
                "memory_bytes": modelled.memory[rank],
                "comm_bytes": sent[rank],
            }
            for rank in range(run.pp)
        ]
    return report


def _total(comm_bytes: Mapping[str, Mapping[str, int]]) -> int:
    return sum(size for ops in comm_bytes.values() for size in ops.values())


def as_text(report: dict[str, Any], hardware: Hardware) -> str:
    """Format the report as a table with one column per run, and what is the first run's alone."""
    refused = {n: c["refused"] for n, c in report["columns"].items() if "refused" in c}
    columns = {n: c for n, c in report["columns"].items() if n not in refused}
    rows = [[name, *cells] for name, cells in _rows([*columns.values()])]
    lines = [text_table([report["hardware"], *columns], rows), ""]
    first = next(iter(columns.values()))
    for number, rank in enumerate(first.get("pipeline_ranks", [])):
        ends = [name for name in rank["units"] if not name.startswith("block")]
        parts = [f"stages {rank['stages']}", f"{len(rank['units']) - len(ends)} blocks", *ends]
        lines.append(
            f"pipeline rank {number}: {', '.join(parts)}; {rank['microbatches_in_flight']} "
            f"micro-batches in flight, {rank['memory_bytes']['peak'] / GIB:,.2f} GiB, "
            f"{_total(rank['comm_bytes']) / GIB:,.3f} GiB sent"
        )
    for kind in first["kinds_of_steps"]:
        sent = f"{kind['bytes'] / GIB:,.3f} GiB, {kind['seconds']:.4g} s (modelled)"
        lines.append(f"{kind['kind']}: {sent}")
    lines += [f"{name}: {reason}" for name, reason in refused.items()]
    for name, column in columns.items():
        if own := column.get("own_optimizer"):
            lines.append(f"{name}: {own} counts as AdamW does, without what it sends itself")
        if column["memory_bytes"]["peak"] > hardware.memory_gib * GIB:
            lines.append(f"{name}: does not fit into {hardware.memory_gib:g} GiB")
    return "\n".join(lines)


def _rows(columns: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    yield "ranks", [f"{c['world']:,}" for c in columns]
    kept = [c["checkpointing"] + ", inputs kept" * c["keeps_inputs"] for c in columns]
    yield "activation checkpointing", kept
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
    yield "gradients (GiB per step)", [_number(c["gradient_bytes"] / GIB) for c in columns]
    sizes = [_number(sum(c["checkpoint_bytes"].values()) / GIB) for c in columns]
    yield "checkpoint (GiB, all ranks)", sizes
    for part in columns[0]["step_time"]:
        speed = part == "tokens_per_s"
        name = "tokens/s (all ranks, modelled)" if speed else f"{part} (s, modelled)"
        yield name, [_number(c["step_time"][part]) for c in columns]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def report_layouts(run: Run, hardware: Hardware, splits: bool = True) -> dict[str, Any]:
    """Find a run's layouts, see `find_layouts`; return them as a dictionary, the fastest first."""
    check = partial(check_job_config, world_size=run.world, device_type="cuda", data="paper")
    found, refused = find_layouts(run, hardware, check, splits)
    found.sort(key=lambda layout: layout.time.total)
    fitting = [layout for layout in found if layout.fits]
    too_large = sorted((each for each in found if not each.fits), key=lambda each: each.peak)
    return {
        "hardware": hardware.name,
        "world": run.world,
        "layouts": [_row(layout, run) for layout in fitting],
        "too_large": [_row(layout, run) for layout in too_large],
        "refused": dict(refused),
        "slower": _slower(fitting),
    }


def in_one_line(run: Run, hardware: Hardware, compares: bool = True) -> str:
    """Say how long a run takes, and whether another layout is faster."""
    own = _row(with_inputs(Modelled(run, hardware)), run)
    memory = own["peak_bytes"] / GIB / hardware.memory_gib
    line = f"modelled: {own['days']:.2g} days, {own['mfu']:.0%} MFU, {memory:.0%} of "
    line += f"{hardware.memory_gib:g} GiB"
    compares = compares and run.world > 1
    others = report_layouts(run, hardware, splits=False)["layouts"] if compares else []
    times = own["step_time"]["total"] / others[0]["step_time"]["total"] if others else 0.0
    if times > 1.1:
        rows = f"{others[0]['microbatch']} rows x {others[0]['microbatches']}"
        line += f"; {others[0]['layout']}, {rows} is modelled {times:.1f} times faster"
    return line


def _row(layout: Modelled, first: Run) -> dict[str, Any]:
    run, seconds = layout.run, layout.time.total
    hours = seconds * run.config.training.steps / 3600
    _, flops = first.size  # of a token, in any layout
    ideal = run.tokens_per_step * flops / (layout.hardware.peak_tflops * 1e12 * run.world)
    return {
        "layout": name_of(run),
        "microbatch": run.microbatch,
        "microbatches": run.rounds,
        "step_time": asdict(layout.time) | {"total": seconds},
        "mfu": ideal / seconds,
        "peak_bytes": layout.peak,
        "days": hours / 24,
        "gpu_hours": hours * run.world,
    }


def name_of(run: Run) -> str:
    """Return a layout's degrees above one, as ``tp 2, fsdp 16``."""
    degrees = {"tp": run.tp, "pp": run.pp, "cp": run.cp, "replicas": run.replicas}
    degrees["fsdp"] = run.shard // run.cp
    return ", ".join(f"{key} {n}" for key, n in degrees.items() if n > 1) or "one rank"


def _slower(fitting: list[Modelled]) -> list[dict[str, Any]]:
    """Compare the fastest layout of each kind beyond the shown ones with the fastest of all."""
    kinds: dict[tuple[int, int, int], Modelled] = {}
    for layout in fitting:
        kinds.setdefault((layout.run.tp, layout.run.pp, layout.run.cp), layout)
    shown = fitting[:SHOWN]
    rows = []
    for layout in kinds.values():
        if layout in shown:
            continue
        best, own = shown[0].time, layout.time
        part = max(_PARTS, key=lambda name: getattr(own, name) - getattr(best, name))
        rows.append({"layout": name_of(layout.run), "times": own.total / best.total, "by": part})
    return rows


def layouts_as_text(report: dict[str, Any]) -> str:
    """Format the fastest layouts as a table; the others by what they lose to."""
    head = ["step", "products", "others", "exposed", "bubble", "optimizer", "host"]
    head += ["MFU", "memory", "rows x rounds", "days", "GPU-hours"]
    rows = []
    for row in report["layouts"][:SHOWN]:
        time = row["step_time"]
        cells = [f"{time[part]:.3f}" for part in ("total", *_PARTS)]
        cells += [f"{row['mfu']:.0%}", f"{row['peak_bytes'] / GIB:.1f}"]
        cells += [f"{row['microbatch']} x {row['microbatches']}"]
        cells += [f"{row['days']:.3g}", f"{row['gpu_hours']:,.0f}"]
        rows.append([row["layout"], *cells])
    title = f"{report['hardware']}, {report['world']:,} ranks"
    lines = [text_table([title, *head], rows), "step and its parts in modelled seconds, memory GiB"]
    for row in report["slower"]:
        lines.append(f"{row['layout']}: {row['times']:.2f} times as long, by {_PARTS[row['by']]}")
    if too_large := report["too_large"]:
        least = too_large[0]
        size = f"{least['layout']} needs least, {least['peak_bytes'] / GIB:.1f} GiB"
        lines.append(f"{len(too_large)} do not fit: of them {size}")
    for key, count in report["refused"].items():
        lines.append(f"{count} are refused: {key}")
    return "\n".join(lines)
