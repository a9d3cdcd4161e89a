# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Costs and results of a scaling experiment: one table, fitted laws, JSON and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from torchtitan_lr.console.figures import new_figure
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.scaling.fit import Fit, fit_points, student
from torchtitan_lr.scaling.pictures import color_of
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.sweep import FINISHED, Point

Row = Mapping[str, Any]


def rows_of(points: Sequence[Point], reference: str) -> list[dict[str, Any]]:
    """Return one row per family, size, budget and shared measure.

    Args:
        points: Returned by `Plan.main_points`, with the rows of a sweep.
        reference: The family that others are compared with.

    Returns:
        The settings of a point without ``seed``, ``seeds`` (their number), ``losses`` (by finished
        seed), and ``loss`` and ``minus_reference`` (of seeds that both have), each the mean and the
        ends of its interval: None with one seed, as the whole is without any.
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


def fits_of(rows: Sequence[Row]) -> dict[str, Fit]:
    """Fit L(C) to the points of each family that no cheaper one beats; every seed is a point."""
    found = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        best: list[Row] = []
        own = [row for row in rows if row["family"] == family and row["losses"]]
        for row in sorted(own, key=lambda row: (row["FLOPs"], row["loss"][0])):
            if not best or row["loss"][0] < best[-1]["loss"][0]:
                best.append(row)
        points = [(row["FLOPs"], loss) for row in best for loss in row["losses"].values()]
        if (fit := fit_points(np.asarray(points, dtype=float).reshape(-1, 2))) is not None:
            found[family] = fit
    return found


def write(plan: Plan, edges: Sequence[str], rows: Sequence[Row], fits: Mapping[str, Fit]) -> str:
    """Write scaling.md, scaling.json and scaling.png into the plan's folder; return the first.

    Args:
        plan: The plan.
        edges: Lines on searches without a result.
        rows: Returned by `rows_of`.
        fits: Returned by `fits_of`.
    """
    experiment = plan.experiment
    parts = [f"# {experiment.name}", experiment.description]
    parts.append(markdown_table(*table(rows, experiment.reference)))
    if fits:
        header = ["family", "points", "E [95%]", "alpha [95%]"]
        laws = []
        for name, fit in fits.items():
            intervals = [with_interval(fit.interval(key), ".3f") for key in ("floor", "alpha")]
            laws.append([name, str(fit.points), *intervals])
        parts.append(markdown_table(header, laws))
    text = "\n\n".join(part for part in [*parts, *edges] if part)
    (plan.work / "scaling.md").write_text(text + "\n")
    data = {"experiment": asdict(experiment), "points": rows}
    data["laws"] = {name: asdict(fit.law) for name, fit in fits.items()}
    (plan.work / "scaling.json").write_text(json.dumps(data, indent=1) + "\n")
    draw(plan, rows, fits).savefig(plan.work / "scaling.png")
    return text


def draw(plan: Plan, rows: Sequence[Row], fits: Mapping[str, Fit]) -> Any:
    """Draw the loss over FLOPs: means and ranges of seeds, and each family's law with its band."""
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    for place, family in enumerate(dict.fromkeys(row["family"] for row in rows if row["losses"])):
        color = color_of(family, place)
        own = [row for row in rows if row["family"] == family and row["losses"]]
        flops, ends = [row["FLOPs"] for row in own], [[*row["losses"].values()] for row in own]
        axes.vlines(flops, [*map(min, ends)], [*map(max, ends)], color=color, lw=1.2)
        axes.plot(flops, [row["loss"][0] for row in own], "o", color=color, ms=4, label=family)
        if fit := fits.get(family):
            at = np.geomspace(min(flops), max(flops), 60)
            axes.fill_between(at, *fit.band(at), color=color, alpha=0.2, linewidth=0)
            axes.plot(at, fit.law(at), color=color, lw=1.4)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    what = "mean and range of seeds" + ("; lines: fit and 95% band" if fits else "")
    figure.suptitle(f"{plan.experiment.description or plan.experiment.name}\n{what}", fontsize=9)
    figure.set_layout_engine("constrained")
    return figure
