# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a scaling experiment costs and found: one table, fitted laws, JSON and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import methodcaller
from typing import Any

import numpy as np

from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.scaling.fit import bootstrap, fit_law, percentiles, student
from torchtitan_lr.scaling.plan import Choice, Plan
from torchtitan_lr.scaling.sweep import FINISHED, Point
from torchtitan_lr.training.figures import color_of, new_figure

MARKDOWN, JSON, PICTURE = "scaling.md", "scaling.json", "scaling.png"

LEAST_POINTS = 4
"""Points of different FLOPs that a law needs; it has three parameters."""

Row = Mapping[str, Any]


def rows_of(points: Sequence[Point], reference: str) -> list[dict[str, Any]]:
    """Return one row per family, size and budget.

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
        key = given["family"], given["size"], given["tokens_per_parameter"]
        row = rows.setdefault(key, given | {"seeds": 0, "losses": {}})
        row["seeds"] += 1
        if point.row["status"] == FINISHED:
            row["losses"][seed] = point.row["val_loss"]
    for (family, size, budget), row in rows.items():
        other = rows[reference, size, budget]["losses"]
        pairs = [loss - other[seed] for seed, loss in row["losses"].items() if seed in other]
        row["loss"] = student(list(row["losses"].values())) if row["losses"] else None
        row["minus_reference"] = student(pairs) if pairs and family != reference else None
    return list(rows.values())


def table(rows: Sequence[Row], reference: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of `rows_of`."""
    header = ["family", "size", "tokens/N", "learning rate", "N", "D", "FLOPs", "seeds"]
    header += ["validation loss [95%]", f"minus {reference} [95%]"]
    cells = [
        [
            *(row["family"], row["size"], f"{row['tokens_per_parameter']:g}"),
            f"{row['learning_rate']:g}" if row["learning_rate"] else "-",
            *(f"{row['N']:,}", f"{row['D']:,}", f"{row['FLOPs']:.3g}"),
            f"{len(row['losses'])}/{row['seeds']}",
            *(with_interval(row["loss"], ".4f"), with_interval(row["minus_reference"], "+.4f")),
        ]
        for row in rows
    ]
    return header, cells


def with_interval(value: tuple[float, float | None, float | None] | None, style: str) -> str:
    """Return a value with its interval, if it has one; ``-`` for None."""
    if value is None:
        return "-"
    middle, *ends = (f"{number:{style}}" for number in value if number is not None)
    return f"{middle} [{', '.join(ends)}]" if ends else middle


def fits_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Fit L(C) to every family's points that no cheaper one beats; every seed is a point.

    Returns:
        By family: ``points``, ``law``, ``laws`` (of the bootstrap), and ``E`` and ``alpha`` with
        their intervals. Families with fewer than `LEAST_POINTS` points are left out.
    """
    found = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        used = frontier([row for row in rows if row["family"] == family and row["losses"]])
        if len(used) < LEAST_POINTS:
            continue
        points = [(row["FLOPs"], loss) for row in used for loss in row["losses"].values()]
        flops, losses = np.asarray(points, dtype=float).T
        law, laws = fit_law(flops, losses), bootstrap(flops, losses)
        found[family] = {
            **{"points": len(used), "law": law, "laws": laws},
            "E": (law.floor, *map(float, percentiles(laws, lambda law: law.floor))),
            "alpha": (law.alpha, *map(float, percentiles(laws, lambda law: law.alpha))),
        }
    return found


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the points of a family that no other one beats: fewer FLOPs and less loss."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["FLOPs"], row["loss"][0])):
        if not best or row["loss"][0] < best[-1]["loss"][0]:
            best.append(row)
    return best


def write(
    plan: Plan,
    rates: Mapping[tuple[str, str], Choice],
    rows: Sequence[Row],
    fits: Mapping[str, Mapping[str, Any]],
) -> str:
    """Write the table, the data and the picture into the plan's folder; return the table.

    Args:
        plan: The plan.
        rates: Returned by `Plan.rates`.
        rows: Returned by `rows_of`.
        fits: Returned by `fits_of`.
    """
    experiment = plan.experiment
    parts = [f"# {experiment.name}", experiment.description]
    parts.append(markdown_table(*table(rows, experiment.reference)))
    if fits:
        laws = [
            [family, str(fit["points"]), *(with_interval(fit[k], ".3f") for k in ("E", "alpha"))]
            for family, fit in fits.items()
        ]
        parts.append(markdown_table(["family", "points", "E [95%]", "alpha [95%]"], laws))
    parts += [f"Edge: {line}." for line in plan.edges(rates)]
    text = "\n\n".join(part for part in parts if part)
    (plan.work / MARKDOWN).write_text(text + "\n")
    laws_shown = {family: asdict(fit["law"]) for family, fit in fits.items()}
    data = {"experiment": asdict(experiment), "points": rows, "laws": laws_shown}
    (plan.work / JSON).write_text(json.dumps(data, indent=1) + "\n")
    draw(plan, rows, fits).savefig(plan.work / PICTURE)
    return text


def draw(plan: Plan, rows: Sequence[Row], fits: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw the loss over FLOPs: means and ranges of seeds, and each family's law with its band.

    Args:
        plan: The plan.
        rows: Returned by `rows_of`; at least one has a loss.
        fits: Returned by `fits_of`.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator  # late: a second

    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    for place, family in enumerate(dict.fromkeys(row["family"] for row in rows if row["losses"])):
        color = color_of(family, place)
        own = [row for row in rows if row["family"] == family and row["losses"]]
        own.sort(key=lambda row: row["FLOPs"])
        flops = np.asarray([row["FLOPs"] for row in own])
        ends = [[*row["losses"].values()] for row in own]
        axes.vlines(flops, [*map(min, ends)], [*map(max, ends)], color=color, lw=1.2)
        axes.plot(flops, [row["loss"][0] for row in own], "o", color=color, ms=4, label=family)
        if fit := fits.get(family):
            at = np.geomspace(flops[0], flops[-1], 60)
            low, high = percentiles(fit["laws"], methodcaller("__call__", at))
            axes.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
            axes.plot(at, fit["law"](at), color=color, lw=1.4)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    what = "mean and range of seeds" + ("; lines: fit and 95% band" if fits else "")
    figure.suptitle(f"{plan.experiment.description or plan.experiment.name}\n{what}", fontsize=9)
    figure.set_layout_engine("constrained")
    return figure
