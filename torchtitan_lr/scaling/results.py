# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Costs and results of a scaling experiment: one table, fitted laws, JSON and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.launch.run_state import FINISHED
from torchtitan_lr.scaling.fit import Fit, fit_points, student
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.sweep import Point
from torchtitan_lr.training.figures import DOTS, THICK, colors_of, finish, new_figure

Row = Mapping[str, Any]


def rows_of(points: Sequence[Point], reference: str) -> list[dict[str, Any]]:
    """Return one row per family, size, budget and shared measure: the settings without ``seed``.

    Added are ``seeds`` (their number), ``losses`` (by finished seed), and ``loss`` and
    ``minus_reference`` (of seeds that both have): the mean and the ends of its interval or None.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for point in points:
        given = dict(point.settings)
        seed = given.pop("seed")
        key = given["family"], given["size"], given["tokens_per_parameter"], given["equal"]
        row = rows.setdefault(key, given | {"seeds": 0, "losses": {}})
        row["seeds"] += 1
        if point.row["status"] == FINISHED:
            row["losses"][seed] = point.row["val_loss"]
    for (family, *setting), row in rows.items():
        base = (reference, *setting)
        other = rows[base]["losses"]
        pairs = [loss - other[seed] for seed, loss in row["losses"].items() if seed in other]
        row["loss"] = student(list(row["losses"].values())) if row["losses"] else None
        row["minus_reference"] = student(pairs) if pairs and family != reference else None
    return list(rows.values())


def table(rows: Sequence[Row], reference: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of `rows_of`."""
    header = ["family", "size", "tokens/N", "equal", "learning rate", "N", "D", "FLOPs", "seeds"]
    header += ["validation loss [95%]", f"minus {reference} [95%]"]
    cells = []
    for row in rows:
        rate = f"{row['learning_rate']:g}" if row["learning_rate"] else "-"
        line = [row["family"], row["size"], f"{row['tokens_per_parameter']:g}", row["equal"]]
        line += [rate, f"{row['N']:,}", f"{row['D']:,}", f"{row['FLOPs']:.3g}"]
        line += [f"{len(row['losses'])}/{row['seeds']}", with_interval(row["loss"], ".4f")]
        cells.append([*line, with_interval(row["minus_reference"], "+.4f")])
    return header, cells


def with_interval(value: tuple[float, float | None, float | None] | None, style: str) -> str:
    """Return a value with its interval, if it has one; ``-`` for None."""
    if value is None:
        return "-"
    middle, *ends = (f"{number:{style}}" for number in value if number is not None)
    return f"{middle} [{', '.join(ends)}]" if ends else middle


def frontier(rows: Sequence[Row], family: str) -> list[Row]:
    """Return the points of a family that no cheaper one beats, the cheapest first."""
    best: list[Row] = []
    own = [row for row in rows if row["family"] == family and row["losses"]]
    for row in sorted(own, key=lambda row: (row["FLOPs"], row["loss"][0])):
        if not best or row["loss"][0] < best[-1]["loss"][0]:
            best.append(row)
    return best


def fits_of(rows: Sequence[Row]) -> dict[str, Fit]:
    """Fit L(C) to the `frontier` of each family; every seed is a point."""
    found = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        best = frontier(rows, family)
        points = [(row["FLOPs"], loss) for row in best for loss in row["losses"].values()]
        if (fit := fit_points(np.asarray(points, dtype=float).reshape(-1, 2))) is not None:
            found[family] = fit
    return found


def judged(rows: Sequence[Row], fits: Mapping[str, Fit]) -> list[dict[str, Any]]:
    """Say of every point how its family's law describes it: three None without a law or a loss.

    ``fitted``: the law was fitted to it; ``minus_law``: its mean loss minus the law's; ``missed``:
    the law's band and the range of its seeds do not touch.
    """
    kept = set()
    for family in fits:
        kept |= {id(row) for row in frontier(rows, family)}
    found = []
    for row in rows:
        judgement: dict[str, Any] = dict.fromkeys(("fitted", "minus_law", "missed"))
        if row["losses"] and (fit := fits.get(row["family"])):
            at = np.asarray([row["FLOPs"]])
            ((low,), (high,)) = fit.band(at)
            losses = row["losses"].values()
            judgement["fitted"] = id(row) in kept
            judgement["minus_law"] = row["loss"][0] - float(fit.law(at)[0])
            judgement["missed"] = bool(min(losses) > high or max(losses) < low)
        found.append({**row, **judgement})
    return found


def law_table(rows: Sequence[Row], fits: Mapping[str, Fit]) -> str:
    """Return the laws as Markdown, with the points that each one misses."""
    lines = []
    for name, fit in fits.items():
        own = [row for row in rows if row["family"] == name and row["losses"]]
        missed = []
        for row in (row for row in own if row["missed"]):
            what = f"{row['size']} {row['tokens_per_parameter']:g} {row['equal']}"
            left_out = "" if row["fitted"] else ", not fitted"
            missed.append(f"{what} ({row['minus_law']:+.3f}{left_out})")
        intervals = [with_interval(fit.interval(key), ".3f") for key in ("floor", "alpha")]
        fitted = f"{sum(row['fitted'] for row in own)} of {len(own)}"
        lines.append([name, fitted, *intervals, "; ".join(missed) or "none"])
    header = ["family", "points", "E [95%]", "alpha [95%]", "misses (loss minus law)"]
    return markdown_table(header, lines)


def write(plan: Plan, edges: Sequence[str], rows: Sequence[Row], fits: Mapping[str, Fit]) -> str:
    """Write scaling.md, scaling.json and scaling.png into the plan's folder; return the first."""
    experiment = plan.experiment
    rows = judged(rows, fits)
    parts = [f"# {experiment.name}", experiment.description]
    parts.append(markdown_table(*table(rows, experiment.reference)))
    if fits:
        parts.append(law_table(rows, fits))
    text = "\n\n".join(part for part in [*parts, *edges] if part)
    write_whole(plan.work / "scaling.md", text + "\n")
    data = {"experiment": asdict(experiment), "points": rows}
    data["laws"] = {name: asdict(fit.law) for name, fit in fits.items()}
    write_whole(plan.work / "scaling.json", json.dumps(data, indent=1) + "\n")
    title, path = experiment.description or experiment.name, plan.work / "scaling.png"
    if len({(row["size"], row["tokens_per_parameter"]) for row in rows}) == 1:
        draw_rows(title, rows, experiment.reference, path)
    else:
        draw(title, rows, fits, path)
    return text


def draw(title: str, rows: Sequence[Row], fits: Mapping[str, Fit], path: Path) -> Any:
    """Draw the loss over FLOPs: means and ranges of seeds, and each family's law with its band."""
    figure = new_figure()
    axes = figure.add_subplot()
    families = list(dict.fromkeys(row["family"] for row in rows if row["losses"]))
    for family, color in colors_of(families).items():
        own = [row for row in rows if row["family"] == family and row["losses"]]
        for row in own:
            losses = row["losses"].values()
            axes.vlines(row["FLOPs"], min(losses), max(losses), color=color, lw=1.2)
            inside = "white" if row["missed"] else color
            label = family if row is own[0] else None
            axes.plot(row["FLOPs"], row["loss"][0], color=color, mfc=inside, label=label, **DOTS)
        if fit := fits.get(family):
            flops = [row["FLOPs"] for row in own]
            at = np.geomspace(min(flops), max(flops), 60)
            axes.fill_between(at, *fit.band(at), color=color, alpha=0.2, linewidth=0)
            axes.plot(at, fit.law(at), color=color, **THICK)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)
    what = "mean and range of seeds"
    if fits:
        what += "; lines: fit and 95% band; hollow: missed by it"
    finish(figure, path, f"{title}\n{what}")
    return figure


def draw_rows(title: str, rows: Sequence[Row], reference: str, path: Path) -> Any:
    """Draw one size and budget, a line per family: its loss, and that minus the reference's."""
    rows = [row for row in rows if row["losses"]]
    several = len({row["equal"] for row in rows}) > 1
    names = [f"{row['family']}, equal {row['equal']}" if several else row["family"] for row in rows]
    figure = new_figure(height=1.6 + 0.35 * len(rows))
    panels = {"loss": "validation loss (nats per token)", "minus_reference": f"minus {reference}"}
    colors = colors_of([row["family"] for row in rows])
    for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for place, row in enumerate(rows):
            if row[key] is None:
                continue
            middle, low, high = row[key]
            color = colors[row["family"]]
            if low is not None:
                axes.hlines(place, low, high, color=color, lw=1.2)
            axes.plot(middle, place, color=color, **DOTS)
        axes.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), names)
        axes.grid(axis="x", alpha=0.3)
    figure.axes[1].axvline(0, color="grey", lw=0.8)
    what = "mean and 95% interval over seeds"
    if max((len(row["losses"]) for row in rows), default=0) == 2:
        what += "; two seeds: t = 12.7"
    finish(figure, path, f"{title}\n{what}")
    return figure
