# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The layouts of a run as a table: the fastest, and why the others lose."""

from dataclasses import asdict
from typing import Any

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.costs.described_run import Run
from torchtitan_lr.costs.hardware import Hardware
from torchtitan_lr.costs.layouts import GIB, Layouts, Modelled, find_layouts

SHOWN = 10
_PARTS = {
    "compute": "products on fewer tokens or rows",
    "element_wise": "other kernels",
    "exposed_communication": "communication that nothing hides",
    "bubble": "the pipeline's idle time",
    "optimizer": "the optimizer on larger shards",
    "host": "the host, which launches its kernels",
}
"""Where a slower layout's time goes, by the parts of `StepTime`."""


def report_layouts(run: Run, hardware: Hardware, splits: bool = True) -> dict[str, Any]:
    """Find a run's layouts, see `find_layouts`; return them as a dictionary, the fastest first."""

    def check(config: Any) -> None:
        check_job_config(config, run.world, "cuda", on_paper=True)

    found = find_layouts(run, hardware, check, splits)
    return {
        "hardware": hardware.name,
        "world": run.world,
        "layouts": [_row(layout, run) for layout in found.fitting],
        "too_large": [_row(layout, run) for layout in found.too_large],
        "refused": dict(found.refused),
        "slower": _slower(found),
    }


def in_one_line(run: Run, hardware: Hardware, compares: bool = True) -> str:
    """Say how long a run takes, and whether another layout is faster."""
    own = _row(Modelled(run, hardware), run)
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
    run = layout.run
    _, flops = first.size  # that of all layouts
    return {
        "layout": name_of(run),
        "microbatch": run.microbatch,
        "microbatches": run.rounds,
        "step_time": asdict(layout.time) | {"total": layout.time.total},
        "mfu": layout.mfu(flops),
        "peak_bytes": layout.peak,
        "days": layout.days,
        "gpu_hours": 24 * layout.days * run.world,
    }


def name_of(run: Run) -> str:
    """Return a layout's degrees above one, as ``tp 2, fsdp 16``."""
    degrees = {"tp": run.tp, "pp": run.pp, "cp": run.cp, "replicas": run.replicas}
    degrees["fsdp"] = run.shard // run.cp
    return ", ".join(f"{key} {n}" for key, n in degrees.items() if n > 1) or "one rank"


def _slower(found: Layouts) -> list[dict[str, Any]]:
    """Compare the fastest layout of each kind beyond the shown ones with the fastest of all."""
    kinds: dict[tuple[int, int, int], Modelled] = {}
    for layout in found.fitting:
        kinds.setdefault((layout.run.tp, layout.run.pp, layout.run.cp), layout)
    shown = found.fitting[:SHOWN]
    rows = []
    for layout in kinds.values():
        if layout in shown:
            continue
        best, own = shown[0].time, layout.time
        more = {part: getattr(own, part) - getattr(best, part) for part in _PARTS}
        part = max(more, key=lambda name: more[name])
        rows.append({"layout": name_of(layout.run), "times": own.total / best.total, "by": part})
    return rows


def as_text(report: dict[str, Any]) -> str:
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
