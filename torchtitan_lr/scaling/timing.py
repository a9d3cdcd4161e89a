# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What measured runs cost, side by side: one row a run, a table and a picture."""

from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

from torchtitan_lr.console.tables import text_table
from torchtitan_lr.scaling.experiments import SECONDS
from torchtitan_lr.training.figures import color_of, new_figure

MEASUREMENT_FILE = "communication.json"
"""What `torchtitan_lr.scaling.measure` writes into the dump folder."""

WATCHED_STEPS = 2
"""How many of a measured run's last steps are not to be timed."""


def row_of(
    name: str, checkpointing: str, timed: list[dict[str, Any]], found: dict[str, Any]
) -> dict[str, Any]:
    """Sum a run up.

    Args:
        name: Of the run.
        checkpointing: Its mode of activation checkpointing.
        timed: Records of ``metrics.jsonl`` of the steps that count.
        found: What `torchtitan_lr.scaling.measure` wrote.

    Returns:
        The row, as in compare.json; ``mfu`` in percent, null where the peak is unknown.
    """
    seconds = [record[SECONDS] for record in timed]
    sent: Counter[str] = Counter()
    for row in found["rows"]:
        sent[row["mesh_dim"]] += row["bytes"]
    of_ranks = found["ranks"]
    utilization = [record["mfu(%)"] for record in timed if record.get("mfu(%)") is not None]
    return {
        "run": name,
        "checkpointing": checkpointing,
        "ranks": len(of_ranks),
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_s": median(record["throughput/tokens_per_s"] for record in timed),
        "mfu": median(utilization) if utilization else None,
        "comm_bytes": sum(sent.values()),
        "comm_bytes_by_mesh_dim": dict(sent),
        "comm_calls": sum(row["calls"] for row in found["rows"]),
        "comm_seconds": mean(rank["communication"] for rank in of_ranks),
        "comm_seconds_min": min(rank["communication"] for rank in of_ranks),
        "profiled_step_seconds": mean(rank["profiled_step"] for rank in of_ranks),
        "peak_memory_gib": max(rank["peak_memory_gib"] for rank in of_ranks),
        "steps": seconds,
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out as a table; the speed-up is over the first run of the same model."""
    header = ["run", "checkpointing", "ranks", "s/step", "range", "speed-up", "tokens/s", "MFU %"]
    header += ["comm MB", "calls", "comm s", "share", "peak GiB"]
    published = any(row["published_seconds"] is not None for row in rows)
    header += ["published s"] * published
    lines = []
    first: dict[str, float] = {}
    for row in rows:
        # A name has a model in front only where there are several, in --tables.
        baseline = first.setdefault(row["run"].rpartition(" ")[0], row["seconds"])
        mfu, share = row["mfu"], row["comm_seconds"] / row["profiled_step_seconds"]
        cells = [row["run"], row["checkpointing"], str(row["ranks"]), f"{row['seconds']:.3f}"]
        cells += [f"{row['seconds_min']:.3f}-{row['seconds_max']:.3f}"]
        cells += [f"{baseline / row['seconds']:.2f}x", f"{row['tokens_per_s']:,.0f}"]
        cells += ["-" if mfu is None else f"{mfu:.1f}", f"{row['comm_bytes'] / 1e6:.2f}"]
        cells += [str(row["comm_calls"]), f"{row['comm_seconds']:.3f}", f"{100 * share:.0f}%"]
        cells += [f"{row['peak_memory_gib']:.2f}"]
        cells += [f"{row['published_seconds'] or 0:.2f}"] * published
        lines.append(cells)
    return text_table(header, lines, left=2)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds, communication and memory as bars, one a run; the title names the modes."""
    names = [row["run"].replace(" ", "\n").replace("_", "\n") for row in rows]
    at = range(len(rows))
    many = len(rows) > 4
    figure = new_figure(*((1.1 * len(rows) + 1, 10) if many else (7.4, 3.4)))
    time, sent, memory = figure.subplots(*((3, 1) if many else (1, 3)))
    seconds = [row["seconds"] for row in rows]
    spread = [
        [row["seconds"] - row["seconds_min"] for row in rows],
        [row["seconds_max"] - row["seconds"] for row in rows],
    ]
    colors = [color_of(row["run"].split()[-1], place) for place, row in enumerate(rows)]
    bars: dict[str, Any] = {"color": colors, "edgecolor": "black", "linewidth": 0.6}
    label = "step, median and range"
    time.bar(at, seconds, yerr=spread, capsize=4, ecolor="grey", alpha=0.55, label=label, **bars)
    running = [row["comm_seconds"] for row in rows]
    label = "collectives running"
    time.bar(at, running, width=0.4, hatch="///", alpha=0.8, label=label, **bars)
    known = [(i, row["published_seconds"]) for i, row in enumerate(rows)]
    known = [(i, published) for i, published in known if published is not None]
    if known:
        time.plot(*zip(*known, strict=True), "kD", markersize=5, label="published, A100")
    time.set_ylabel("seconds")
    # Room for the legend above the tallest bar.
    tallest = [*running, *(row["seconds_max"] for row in rows), *(s for _, s in known)]
    time.set_ylim(0, 1.35 * max(tallest))
    time.legend(fontsize=7, loc="upper right")
    sent.bar(at, [row["comm_bytes"] / 1e6 for row in rows], **bars)
    sent.set_ylabel("MB of collectives per step and rank")
    memory.bar(at, [row["peak_memory_gib"] for row in rows], **bars)
    memory.set_ylabel("peak memory of a rank (GiB)")
    for axes in (time, sent, memory):
        axes.set_xticks(list(at), names, fontsize=8)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    modes = {row["run"]: row["checkpointing"] for row in rows}
    runs = {mode: ", ".join(run for run in modes if modes[run] == mode) for mode in modes.values()}
    named = [mode if len(runs) == 1 else f"{mode} ({runs[mode]})" for mode in runs]
    figure.suptitle(f"activation checkpointing: {', '.join(named)}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
