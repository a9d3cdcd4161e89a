# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The picture of an experiment: laws over sizes, curves of one shape, or the loss over levels.

Where families are compared at equal parameters, it is the loss over the FLOPs of their budgets.
"""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.scaling.fit import interval
from torchtitan_lr.scaling.plan import FINISHED, Plan
from torchtitan_lr.scaling.points import AXES, Fit, Point
from torchtitan_lr.training.figures import color_of, few_log_ticks, new_figure, series, smoothed
from torchtitan_lr.training.history import HISTORY_FILE, TRAIN_LOSS, read_history

LOSS = "validation loss\n(nats per token)"
_MARKERS, _DASHES = "osv^D", ("-", "--", "-.", ":")
_NONE = "none on one rank"


def draw(plan: Plan, found: Mapping[str, Any], path: Path) -> Any:
    """Draw what the experiment compares: levels, budgets, curves of one shape, or laws over sizes.

    Args:
        plan: The plan.
        found: Returned by `report.results`.
        path: The PNG to write.

    Returns:
        The figure.
    """
    if any(family.group for family in plan.experiment.families.values()):
        figure = draw_levels(plan, found["points"])
    elif plan.experiment.match == "parameters":
        figure = draw_budgets(plan, found["points"])
    elif _has_one_shape(plan):
        figure = draw_curves(plan, found["points"])
    else:
        figure = draw_laws(plan, found)
    figure.savefig(path)
    return figure


def _has_one_shape(plan: Plan) -> bool:
    """Return whether all runs of a family at a size are repetitions, and all sizes one shape."""
    experiment = plan.experiment
    shapes = {plan.costs[experiment.first, size].parameters for size in experiment.sizes}
    return len(shapes) == 1 and all(len(experiment.budgets_of(s)) == 1 for s in experiment.sizes)


def draw_laws(plan: Plan, found: Mapping[str, Any]) -> Any:
    """Draw the loss against each of `AXES`: points with seeds, the fit, and its band."""
    figure = new_figure(7.2, 6.2)
    panels = figure.subplots(2, 2, sharey=True)
    families = plan.experiment.families
    colors = {name: color_of(name, place) for place, name in enumerate(families)}
    for axes, (axis, label) in zip(panels.flat, AXES.items(), strict=True):
        shown = [point for point in found["points"] if getattr(point, axis) > 0]
        fits = {fit.family: fit for fit in found["fits"] if fit.axes == (axis,)}
        for name in families:
            own = [point for point in shown if point.family == name]
            _draw_points(axes, axis, own, colors[name], name not in fits)
            if name in fits:
                _draw_law(axes, fits[name], [getattr(p, axis) for p in own], colors[name])
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if shown:
            axes.set_xscale("log")
            few_log_ticks(axes.xaxis, *axes.get_xlim())
        else:
            axes.text(0.5, 0.5, _NONE, ha="center", transform=axes.transAxes)
    losses = [loss for point in found["points"] for loss in point.losses]
    margin = 0.08 * (max(losses) - min(losses)) or 0.1
    # The points, not the widest band, determine the scale.
    panels[0, 0].set_ylim(min(losses) - margin, max(losses) + margin)
    for axes in panels[:, 0]:
        axes.set_ylabel(LOSS)
    keys: dict[str, dict[str, Any]] = {name: {"color": colors[name]} for name in families}
    budgets = list(dict.fromkeys(point.budget for point in found["points"]))
    for place, budget in enumerate(sorted(budgets)):
        style = {"color": "grey", "marker": _MARKERS[place % 5], "ls": "none", "ms": 5}
        keys[f"{budget:g} tokens per parameter"] = style
    _finish(figure, plan, "dots and bars: mean and range of seeds; lines: fit, 95% band", keys)
    return figure


def _draw_points(axes: Any, axis: str, points: Sequence[Point], color: str, joined: bool) -> None:
    """Draw a family's means with the range of seeds; without a law, joined along each budget."""
    key = lambda point: point.budget  # noqa: E731
    for place, (_, group) in enumerate(groupby(sorted(points, key=key), key=key)):
        own = sorted(group, key=lambda point: getattr(point, axis))
        xs, means = [getattr(p, axis) for p in own], [p.loss for p in own]
        low, high = [min(p.losses) for p in own], [max(p.losses) for p in own]
        axes.vlines(xs, low, high, color=color, lw=1.2)
        axes.plot(xs, means, _MARKERS[place % 5], ms=4, color=color)
        if joined:
            axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
            axes.plot(xs, means, color=color, lw=1.0)


def _draw_law(axes: Any, fit: Fit, xs: Sequence[float], color: str) -> None:
    at = np.geomspace(min(xs), max(xs), 60)[:, None]
    low, high = interval(fit.laws, lambda law: law(at))
    axes.fill_between(at[:, 0], low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(at[:, 0], fit.law(at), color=color, linewidth=1.4)


def draw_curves(plan: Plan, points: Sequence[Point]) -> Any:
    """Draw the training loss over steps and bytes sent, with bands over seeds.

    The size is that of the most families; of several, the last one.
    """
    counts = [sum(p.size == size for p in points) for size in plan.experiment.sizes]
    size = max(zip(counts, range(len(counts)), plan.experiment.sizes, strict=True))[2]
    figure = new_figure(7.2, 3.7)
    left, right = figure.subplots(1, 2, sharey=True)
    keys, most = {}, [1.0]
    for place, point in enumerate(point for point in points if point.size == size):
        runs = [run for run in plan.main_runs() if run.family == point.family and run.size == size]
        runs = [r for r in runs if plan.records.get(r.name, {}).get("status") == FINISHED]
        steps, lines = _training_losses([plan.folder(run) for run in runs])
        # The first line stays visible below one that covers it.
        style: dict[str, Any] = {"color": color_of(point.family, place)}
        keys[point.family] = style | {"lw": 1.2 if place else 2.4, "ls": "-"}
        sent = np.asarray(steps) * plan.costs[point.family, size].bytes_per_step / 1e6
        for axes, xs in ((left, steps), (right, sent)):
            if np.max(xs) > 0:
                axes.fill_between(xs, lines.min(0), lines.max(0), alpha=0.2, lw=0, **style)
                axes.plot(xs, lines.mean(0), **keys[point.family])
        most.append(float(sent[-1]))
    left.set_xlabel("step")
    left.set_ylabel("training loss (nats per token)")
    right.set_xlabel("MB sent per rank")
    if right.lines:
        right.set_xscale("log")
        right.set_xlim(left=max(most) / 1e3)
        few_log_ticks(right.xaxis, *right.get_xlim())
    else:
        right.text(0.5, 0.5, _NONE, ha="center", transform=right.transAxes)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    _finish(figure, plan, f"{max(steps):,} steps, mean and range of seeds", keys)
    return figure


def _training_losses(folders: Sequence[Path]) -> tuple[list[float], Any]:
    """Return the steps that all histories have, and the smoothed losses (seeds, steps)."""
    curves = [series(read_history(folder / HISTORY_FILE), TRAIN_LOSS) for folder in folders]
    count = min(len(steps) for steps, _ in curves)
    return curves[0][0][:count], np.asarray([smoothed(losses)[:count] for _, losses in curves])


def draw_budgets(plan: Plan, points: Sequence[Point]) -> Any:
    """Draw the loss over the FLOPs of the budgets, a line for each family and size."""
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    keys: dict[str, Any] = {}
    sizes = list(dict.fromkeys(point.size for point in points))
    for place, name in enumerate(dict.fromkeys(point.family for point in points)):
        color = color_of(name, place)
        keys[name] = {"color": color}
        for row, size in enumerate(sizes):
            own = [point for point in points if (point.family, point.size) == (name, size)]
            own.sort(key=lambda point: point.flops)
            xs = [point.flops for point in own]
            low, high = [min(p.losses) for p in own], [max(p.losses) for p in own]
            axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
            style = {"marker": _MARKERS[row % 5], "ms": 5, "lw": 1.4, "ls": _DASHES[row % 4]}
            axes.plot(xs, [point.loss for point in own], color=color, **style)
            axes.vlines(xs, low, high, color=color, lw=0.8)
            if len(sizes) > 1:
                keys[size] = style | {"color": "grey"}
    axes.set_xscale("log")
    few_log_ticks(axes.xaxis, *axes.get_xlim())
    axes.set_xlabel(AXES["flops"])
    axes.set_ylabel(LOSS)
    axes.grid(alpha=0.3)
    _finish(figure, plan, "mean and range of seeds", keys)
    return figure


def draw_levels(plan: Plan, points: Sequence[Point]) -> Any:
    """Draw the loss over the levels of each group, with bands of the seeds' range."""
    families = plan.experiment.families
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    keys: dict[str, Any] = {}
    name = plan.experiment.first
    first = next((point for point in points if point.family == name), None)
    if first is not None and not _shares_a_line(plan, name):
        style: dict[str, Any] = {"color": color_of(name)}
        axes.axhspan(min(first.losses), max(first.losses), alpha=0.15, linewidth=0, **style)
        keys[name] = style | {"lw": 1.2, "ls": "--"}
        axes.axhline(first.loss, **keys[name])
    levels = set()
    for place, group in enumerate(dict.fromkeys(f.group for f in families.values() if f.group)):
        own = [point for point in points if families[point.family].group == group]
        own.sort(key=lambda point: families[point.family].level)
        if len(own) < 2:
            continue
        xs = [families[point.family].level for point in own]
        levels.update(xs)
        style = {"color": color_of(group, place)}
        ends = ([min(p.losses) for p in own], [max(p.losses) for p in own])
        axes.fill_between(xs, *ends, alpha=0.2, linewidth=0, **style)
        # Wide below narrow: lines that coincide are both seen.
        keys[group] = style | {"marker": _MARKERS[place % 5], "ms": 5, "ls": _DASHES[place % 4]}
        keys[group] |= {"lw": 2.6 if place == 0 else 1.4}
        axes.plot(xs, [point.loss for point in own], **keys[group])
    axes.set_xticks(sorted(levels), [f"{level:g}" for level in sorted(levels)])
    axes.set_xlabel(plan.experiment.levels)
    axes.set_ylabel(LOSS)
    axes.grid(alpha=0.3)
    _finish(figure, plan, "mean and range of seeds", keys)
    return figure


def _shares_a_line(plan: Plan, family: str) -> bool:
    """Return whether a family lies on a line with others."""
    families = plan.experiment.families.values()
    own = plan.experiment.families[family].group
    return bool(own) and sum(other.group == own for other in families) > 1


def _finish(figure: Any, plan: Plan, what: str, keys: Mapping[str, dict[str, Any]]) -> None:
    """Add the title and, below the panels, the legend."""
    from matplotlib.lines import Line2D

    title = plan.experiment.description or plan.experiment.name
    figure.suptitle("\n".join([*textwrap.wrap(title, 80), what]), fontsize=10)
    figure.set_layout_engine("constrained")
    lines = [Line2D([], [], **({"lw": 1.6} | style), label=name) for name, style in keys.items()]
    columns = min(len(lines), 4 if len(lines) != 6 else 3)
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, fontsize=9)
