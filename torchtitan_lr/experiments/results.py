# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Costs and results of an experiment: one table, fitted laws, JSON and a picture.

A law is L(C) = E + A C^(-alpha), fitted by the Huber loss of log L (Hoffmann et al., 2022, approach
3). Its intervals are percentiles of bootstrap fits; those of a mean over seeds are Student's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.console.terminal import markdown_table
from torchtitan_lr.experiments.plan import Plan
from torchtitan_lr.experiments.sweep import Point
from torchtitan_lr.launch.run_folder import FINISHED
from torchtitan_lr.training.figures import DOTS, THICK, colors_of, finish, new_figure

Row = Mapping[str, Any]
Array = np.ndarray[Any, np.dtype[np.float64]]

# Difference of log L from which a point counts linearly, not squared (Hoffmann et al., D.2)
HUBER = 1e-3
EDGES = (0.025, 0.975)  # the quantiles of an interval
LEAST_POINTS = 4  # of different FLOPs that a law needs: it has three parameters
DRAWS = 500  # resamples of a fit
# Bounds of log E, log A and alpha; exp(-14) stands for no floor, or no such term
_LIMITS = np.asarray([-14.0, -14.0, 1e-3]), np.asarray([14.0, 14.0, 4.0])


@dataclass(frozen=True)
class Law:
    """A fitted law."""

    floor: float  # E, the loss that no compute reduces, nats per token
    factor: float  # A: the loss that remains above it at ``unit``
    alpha: float  # the exponent
    unit: float  # unit of C in FLOPs, the geometric mean of the fitted points

    def __call__(self, flops: Array) -> Array:
        """Return the losses (points,) at C (points,)."""
        return np.asarray(self.floor + self.factor * (flops / self.unit) ** -self.alpha)


@dataclass(frozen=True)
class Fit:
    """A law with its bootstrap."""

    law: Law  # the law of all points
    draws: list[Law]  # laws of resampled points

    def interval(self, name: str) -> tuple[float, float, float]:
        """Return the law's ``floor`` or ``alpha`` and the ends of its interval."""
        low, high = np.quantile([getattr(law, name) for law in self.draws], EDGES)
        return getattr(self.law, name), float(low), float(high)

    def band(self, flops: Array) -> Array:
        """Return the ends of the loss's interval (2, points) at C (points,)."""
        return np.asarray(np.quantile([law(flops) for law in self.draws], EDGES, axis=0))


def fit_points(points: Array, draws: int = DRAWS) -> Fit | None:
    """Fit a law to C and the loss (points, 2); None below `LEAST_POINTS` different C."""
    if len(np.unique(points[:, 0])) < LEAST_POINTS:
        return None
    law, laws, generator = fit_law(points), [], np.random.default_rng(0)
    for _ in range(draws):
        chosen = points[generator.integers(0, len(points), len(points))]
        if len(np.unique(chosen[:, 0])) >= 3:
            laws.append(fit_law(chosen, law))
    return Fit(law, laws)


def fit_law(points: Array, start: Law | None = None) -> Law:
    """Fit a law to C and the loss (points, 2), near another law or from a grid of exponents."""
    flops, losses = points.T
    unit = float(np.exp(np.log(flops).mean())) if start is None else start.unit
    logs = np.log(flops / unit)

    def residual(theta: Array) -> Array:
        law = np.exp(theta[0]) + np.exp(theta[1] - theta[2] * logs)
        return np.asarray(np.log(law / losses))

    found = []
    for alpha in np.geomspace(0.02, 2.0, 7) if start is None else [start.alpha]:
        # Begin with E and A by least squares of relative errors, not negative.
        columns = np.column_stack([np.ones(len(logs)), np.exp(-alpha * logs)])
        solution, _ = optimize.nnls(columns / losses[:, None], np.ones(len(logs)))
        begin = np.clip([*np.log(np.maximum(solution, 1e-6)), alpha], *_LIMITS)
        found.append(
            optimize.least_squares(residual, begin, bounds=_LIMITS, loss="huber", f_scale=HUBER)
        )
    theta = min(found, key=lambda result: float(result.cost)).x
    return Law(float(np.exp(theta[0])), float(np.exp(theta[1])), float(theta[2]), unit)


def student(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean of values and its interval by Student's t; none for one value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = float(stats.t.ppf(EDGES[1], len(values) - 1) * stats.sem(values))
    return mean, mean - half, mean + half


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


def law_table(rows: Sequence[Row], fits: Mapping[str, Fit]) -> str:
    """Return the laws as Markdown, with the fitted point that is farthest from its law."""
    lines = []
    for name, fit in fits.items():
        best = frontier(rows, name)
        losses = np.asarray([row["loss"][0] for row in best])
        errors = losses - fit.law(np.asarray([row["FLOPs"] for row in best]))
        intervals = [with_interval(fit.interval(key), ".3f") for key in ("floor", "alpha")]
        fitted = f"{len(best)} of {sum(row['family'] == name for row in rows)}"
        lines.append([name, fitted, *intervals, f"{errors[np.abs(errors).argmax()]:+.3f}"])
    header = ["family", "points", "E [95%]", "alpha [95%]", "largest loss minus law"]
    return markdown_table(header, lines)


def write(plan: Plan, edges: Sequence[str], rows: Sequence[Row], fits: Mapping[str, Fit]) -> str:
    """Write scaling.md, scaling.json and scaling.png into the plan's folder; return the first."""
    experiment = plan.experiment
    title = experiment.description or experiment.name
    parts = [f"# {experiment.name}", experiment.description]
    parts.append(markdown_table(*table(rows, experiment.reference)))
    parts += [law_table(rows, fits)] if fits else []
    text = "\n\n".join(part for part in [*parts, *edges] if part)
    write_whole(plan.work / "scaling.md", text + "\n")
    laws = {name: asdict(fit.law) for name, fit in fits.items()}
    data = {"experiment": asdict(experiment), "points": rows, "laws": laws}
    write_whole(plan.work / "scaling.json", json.dumps(data, indent=1) + "\n")
    finished = [row for row in rows if row["losses"]]
    if len({(row["size"], row["tokens_per_parameter"]) for row in rows}) == 1:
        draw_rows(title, finished, experiment.reference, plan.work / "scaling.png")
    else:
        draw(title, finished, fits, plan.work / "scaling.png")
    return text


def draw(title: str, rows: Sequence[Row], fits: Mapping[str, Fit], path: Path) -> None:
    """Draw the loss over FLOPs: means and ranges of seeds, and each family's law with its band."""
    figure = new_figure()
    axes = figure.add_subplot()
    for family, color in colors_of([row["family"] for row in rows]).items():
        own = [row for row in rows if row["family"] == family]
        flops = [row["FLOPs"] for row in own]
        lowest = [min(row["losses"].values()) for row in own]
        highest = [max(row["losses"].values()) for row in own]
        axes.vlines(flops, lowest, highest, color=color, lw=1.2)
        axes.plot(flops, [row["loss"][0] for row in own], color=color, label=family, **DOTS)
        if fit := fits.get(family):
            at = np.geomspace(min(flops), max(flops), 60)
            axes.fill_between(at, *fit.band(at), color=color, alpha=0.2, linewidth=0)
            axes.plot(at, fit.law(at), color=color, **THICK)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.3)
    what = "mean and range of seeds" + ("; lines: fit and 95% band" if fits else "")
    finish(figure, path, f"{title}\n{what}")


def draw_rows(title: str, rows: Sequence[Row], reference: str, path: Path) -> None:
    """Draw one size and budget, a line per family: its loss, and that minus the reference's."""
    several = len({row["equal"] for row in rows}) > 1
    figure = new_figure(height=1.6 + 0.35 * len(rows))
    panels = {"loss": "validation loss (nats per token)", "minus_reference": f"minus {reference}"}
    colors = colors_of([row["family"] for row in rows])
    for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for row in rows:
            if row[key] is None:
                continue
            middle, _, high = row[key]
            name = f"{row['family']}, equal {row['equal']}" if several else row["family"]
            reach = None if high is None else high - middle
            axes.errorbar(middle, name, xerr=reach, color=colors[row["family"]], **DOTS)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()  # which the panels share
    figure.axes[1].axvline(0, color="grey", lw=0.8)
    what = "mean and 95% interval over seeds"
    if max(len(row["losses"]) for row in rows) == 2:
        what += "; two seeds: t = 12.7"
    finish(figure, path, f"{title}\n{what}")
