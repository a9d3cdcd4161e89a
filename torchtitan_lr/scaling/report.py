# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a scaling experiment costs and found: one table, fitted laws, JSON and a picture."""

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.scaling.fit import bootstrap, fit_law, percentiles, student
from torchtitan_lr.scaling.plan import Choice, Plan
from torchtitan_lr.scaling.sweep import FINISHED, Point
from torchtitan_lr.training.figures import color_of, new_figure

MARKDOWN, JSON, PICTURE = "scaling.md", "scaling.json", "scaling.png"


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


def table(rows: Sequence[Mapping[str, Any]], reference: str) -> tuple[list[str], list[list[str]]]:
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


def fits_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fit every family's laws that its points allow.

    L(C) is fitted to the points that no cheaper one beats, at least four; L(N, D) to all, at least
    six, of three sizes and two budgets. Every finished seed is a point.

    Returns:
        ``family``, ``over`` (``FLOPs`` or ``N and D``), ``points``, ``law``, ``laws`` (of the
        bootstrap), and ``E``, ``alpha`` and ``beta`` with their intervals.
    """
    found = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family and row["losses"]]
        for over, least in ((("FLOPs",), 4), (("N", "D"), 6)):
            used = frontier(own) if over == ("FLOPs",) else own
            budgets = {row["tokens_per_parameter"] for row in used}
            if over != ("FLOPs",) and (len({row["N"] for row in used}) < 3 or len(budgets) < 2):
                continue
            points = [([row[k] for k in over], y) for row in used for y in row["losses"].values()]
            x = np.asarray([values for values, _ in points], dtype=float)
            losses = np.asarray([loss for _, loss in points])
            if len(points) == 0 or len(np.unique(x, axis=0)) < least:
                continue
            law, laws = fit_law(x, losses), bootstrap(x, losses)
            fit = {"family": family, "over": over, "points": len(used), "law": law, "laws": laws}
            getters = {"E": lambda law: law.floor, "alpha": lambda law: law.exponents[0]}
            if len(over) == 2:
                getters["beta"] = lambda law: law.exponents[1]
            for name, value in getters.items():
                fit[name] = (value(law), *map(float, percentiles(laws, value)))
            found.append(fit)
    return found


def frontier(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the points of a family that no other one beats: fewer FLOPs and less loss."""
    best: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["FLOPs"], row["loss"][0])):
        if not best or row["loss"][0] < best[-1]["loss"][0]:
            best.append(row)
    return best


def write(
    plan: Plan,
    rates: Mapping[tuple[str, str], Choice],
    rows: Sequence[Mapping[str, Any]],
    fits: Sequence[Mapping[str, Any]],
) -> str:
    """Write the table, the data and the picture into the plan's folder.

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
            [fit["family"], " and ".join(fit["over"]), str(fit["points"])]
            + [with_interval(fit.get(name), ".3f") for name in ("E", "alpha", "beta")]
            for fit in fits
        ]
        header = ["family", "law over", "points", "E [95%]", "alpha [95%]", "beta [95%]"]
        parts.append(markdown_table(header, laws))
    parts += [f"Edge: {line}." for line in plan.edges(rates)]
    text = "\n\n".join(part for part in parts if part)
    (plan.work / MARKDOWN).write_text(text + "\n")
    chosen = [{"family": f, "size": s} | asdict(choice) for (f, s), choice in rates.items()]
    data = {"experiment": asdict(experiment), "learning_rates": chosen, "points": rows}
    shown = [{k: v for k, v in fit.items() if k != "laws"} for fit in fits]
    data["laws"] = [fit | {"law": asdict(fit["law"])} for fit in shown]
    (plan.work / JSON).write_text(json.dumps(data, indent=1) + "\n")
    draw(plan, rows, fits).savefig(plan.work / PICTURE)
    return text


def draw(plan: Plan, rows: Sequence[Mapping[str, Any]], fits: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the loss over FLOPs: means and ranges of seeds, and each family's law with its band.

    Args:
        plan: The plan.
        rows: Returned by `rows_of`; at least one has a loss.
        fits: Returned by `fits_of`.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator  # late: a second

    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    budgets = sorted({row["tokens_per_parameter"] for row in rows})
    families = list(dict.fromkeys(row["family"] for row in rows if row["losses"]))
    for place, family in enumerate(families):
        color = color_of(family, place)
        axes.plot([], [], color=color, label=family)
        fit = next((f for f in fits if (f["family"], f["over"]) == (family, ("FLOPs",))), None)
        own = [row for row in rows if row["family"] == family and row["losses"]]
        own.sort(key=lambda row: row["FLOPs"])
        for marker, budget in zip(itertools.cycle("osv^D"), budgets, strict=False):
            line = [row for row in own if row["tokens_per_parameter"] == budget]
            xs, means = [row["FLOPs"] for row in line], [row["loss"][0] for row in line]
            ends = [[*row["losses"].values()] for row in line]
            axes.vlines(xs, [*map(min, ends)], [*map(max, ends)], color=color, lw=1.2)
            axes.plot(xs, means, color=color, marker=marker, ms=4, lw=0.0 if fit else 1.0)
        if fit is not None:
            at = np.geomspace(own[0]["FLOPs"], own[-1]["FLOPs"], 60)[:, None]
            band = percentiles(fit["laws"], operator.methodcaller("__call__", at))
            axes.fill_between(at[:, 0], *band, color=color, alpha=0.2, linewidth=0)
            axes.plot(at[:, 0], fit["law"](at), color=color, lw=1.4)
    for marker, budget in zip(itertools.cycle("osv^D"), budgets, strict=False):
        label = f"{budget:g} tokens per parameter"
        axes.plot([], [], color="grey", marker=marker, ms=4, ls="none", label=label)
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
