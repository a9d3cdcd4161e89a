# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Costs of short runs side by side: points of a sweep, a table and a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.console.figures import TEXT, finish, new_figure
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.run_state import FINISHED
from torchtitan_lr.scaling.experiments import step_records
from torchtitan_lr.scaling.pictures import colors_of
from torchtitan_lr.scaling.sweep import Point
from torchtitan_lr.scaling.variants import derive, read_plans, shared_mode
from torchtitan_lr.training.history import COMM_BYTES, MFU, STEP_SECONDS, TOKENS_PER_S

COUNTED = "-bytes"
"""Suffix of the point whose collectives are counted: a counted step is slower, so it is not timed.
Its second step counts; the first one is special for some optimizers."""

_QUIET = [
    *("--metrics.log_freq=1", "--metrics.no_enable_tensorboard"),
    *("--validation.no_enable", "--checkpoint.no_enable"),
]


def points_of(args: argparse.Namespace) -> list[Point]:
    """Return two points of each run: one that is timed, and one whose collectives are counted.

    Raises:
        ConfigError: A TOML cannot be read, two have the same name, or a plan does not exist.
    """
    configs = {Path(config).stem: find_config(config) for config in args.configs}
    if len(configs) < len(args.configs):
        raise ConfigError("CONFIG", " ".join(args.configs), "files of different names")
    runs: dict[str, tuple[str, list[str], str]] = {}
    for name, config in configs.items():
        given = build_job_config([f"--job.config_file={config}", *args.overrides])
        runs[name] = config, [], given.activation_checkpoint.mode
    if len(configs) == 1:
        ((config, _, mode),) = runs.values()
        plans = read_plans(args.plans, config, args.overrides)
        mode = shared_mode(mode, plans)
        runs = {plan: (config, derive(config, plan, args.overrides), mode) for plan in plans}
    points = []
    for name, (config, derived, mode) in runs.items():
        common = [*args.overrides, *derived, f"--activation_checkpoint.mode={mode}", *_QUIET]
        common.append(f"--metrics.wandb_group={args.group or Path(args.out).name}")
        for suffix, steps in {"": args.warmup + args.steps, COUNTED: 2}.items():
            own = [f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={steps // 2}"]
            own.append(f"--metrics.{'' if suffix else 'no_'}comm_ledger")
            own.append(f"--metrics.wandb_run_name={name}{suffix}")
            settings = {"run": name, "checkpointing": mode}
            points.append(Point(name + suffix, config, [*common, *own], settings))
    return points


def rows_of(work: Path, points: Sequence[Point], warmup: int) -> list[dict[str, Any]]:
    """Return one row per run that finished, as in compare.json.

    Args:
        work: The folder of the sweep.
        points: Returned by `points_of`, after their runs.
        warmup: Steps that are not timed.

    Returns:
        ``run``, ``checkpointing``, ``seconds`` per step (median, ``_min``, ``_max``),
        ``tokens_per_s`` of all ranks, ``mfu`` (percent; None if the device's peak is unknown),
        ``comm_bytes`` of rank 0 per step and ``comm_bytes_by_mesh_dim`` (elements once per call
        times item size; None if the counted run failed), ``peak_memory_gib`` of the largest rank,
        and ``steps``, the seconds of every timed step.
    """
    rows = []
    for timed, counted in zip(points[::2], points[1::2], strict=True):
        if timed.row["status"] != FINISHED:
            continue
        records = [r for r in step_records(work / timed.name) if r["step"] > warmup]
        seconds = [record[STEP_SECONDS] for record in records]
        mfu = [record[MFU] for record in records if record.get(MFU) is not None]
        sent = None
        if counted.row["status"] == FINISHED:
            last = step_records(work / counted.name)[-1]
            sent = {
                key.removeprefix(COMM_BYTES): size
                for key, size in last.items()
                if key.startswith(COMM_BYTES)
            }
        rows.append(
            {
                **timed.settings,
                "seconds": median(seconds),
                "seconds_min": min(seconds),
                "seconds_max": max(seconds),
                "tokens_per_s": median(record[TOKENS_PER_S] for record in records),
                "mfu": median(mfu) if mfu else None,
                "comm_bytes": None if sent is None else sum(sent.values()),
                "comm_bytes_by_mesh_dim": sent,
                "peak_memory_gib": timed.row["peak_memory_gib"],
                "steps": seconds,
            }
        )
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out as a table; the speed-up is over the first run."""
    header = ["run", "checkpointing", "s/step", "range", "speed-up", "tokens/s", "MFU %"]
    lines = []
    for row in rows:
        mfu, sent = row["mfu"], row["comm_bytes"]
        cells = [row["run"], row["checkpointing"], f"{row['seconds']:.3f}"]
        cells += [f"{row['seconds_min']:.3f}-{row['seconds_max']:.3f}"]
        cells += [f"{rows[0]['seconds'] / row['seconds']:.2f}x", f"{row['tokens_per_s']:,.0f}"]
        cells += ["-" if mfu is None else f"{mfu:.1f}"]
        cells += ["-" if sent is None else f"{sent / 1e6:.2f}", f"{row['peak_memory_gib']:.2f}"]
        lines.append(cells)
    return text_table([*header, "comm MB", "peak GiB"], lines, left=2)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds, bytes and memory as bars, one a run."""
    figure = new_figure(height=1 + 0.35 * len(rows))
    panels = {
        "seconds per step": [row["seconds"] for row in rows],
        "MB of collectives per step and rank": [(row["comm_bytes"] or 0) / 1e6 for row in rows],
        "peak memory of a rank (GiB)": [row["peak_memory_gib"] for row in rows],
    }
    known = colors_of([row["run"] for row in rows])
    colors = [known[row["run"]] for row in rows]
    names = [f"{row['run']}\n({row['checkpointing']})" for row in rows]
    for axes, (label, values) in zip(
        figure.subplots(1, 3, sharey=True), panels.items(), strict=True
    ):
        axes.barh(range(len(rows)), values, color=colors, edgecolor="black", linewidth=0.6)
        axes.set_xlabel(label, fontsize=TEXT)
        axes.set_yticks(range(len(rows)), names, fontsize=TEXT)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    ends = [[row["seconds"] - row["seconds_min"] for row in rows]]
    ends.append([row["seconds_max"] - row["seconds"] for row in rows])
    figure.axes[0].errorbar(
        *([row["seconds"] for row in rows], range(len(rows))), xerr=ends, fmt="none", ecolor="grey"
    )
    finish(figure, path, "median and range of steps; activation checkpointing in brackets")
