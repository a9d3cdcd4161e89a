# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The picture of an experiment: laws over sizes, curves of one shape, or the loss over levels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.tools.scaling.fit import interval
from torchtitan_lr.tools.scaling.plan import FINISHED, Plan
from torchtitan_lr.tools.scaling.points import AXES, Fit, Point
from torchtitan_lr.training.figures import color_of, new_figure, series, smoothed
from torchtitan_lr.training.history import HISTORY_FILE, TRAIN_LOSS, read_history

LOSS = "validation loss (nats per token)"


def draw(plan: Plan, found: Mapping[str, Any], path: Path) -> None:
    """Draw what the experiment compares: levels, curves of one shape, or laws over sizes.

    Args:
        plan: The plan.
        found: Returned by `report.results`.
        path: The PNG to write.
    """
    if any(family.group for family in plan.experiment.families.values()):
        draw_levels(plan, found["points"], path)
    elif len({plan.costs[pair].parameters for pair in plan.costs if pair[0] == _first(plan)}) == 1:
        draw_curves(plan, found["points"], path)
    else:
        draw_laws(plan, found, path)


def draw_laws(plan: Plan, found: Mapping[str, Any], path: Path) -> None:
    """Draw the loss against each of `AXES`: points with seeds, the fit, and its band."""
    figure = new_figure(9, 6.5)
    panels = figure.subplots(2, 2).flat
    families = plan.experiment.families
    colors = {name: color_of(name, place) for place, name in enumerate(families)}
    for axes, (axis, label) in zip(panels, AXES.items(), strict=True):
        shown = [point for point in found["points"] if getattr(point, axis) > 0]
        for name in families:
            own = [point for point in shown if point.family == name]
            xs = [getattr(p, axis) for p in own for _ in p.losses]
            ys = [loss for p in own for loss in p.losses]
            axes.plot(xs, ys, "o", markersize=4, color=colors[name], label=name)
        for fit in found["fits"]:
            if fit.axes == (axis,):
                own = [point for point in shown if point.family == fit.family]
                _draw_law(axes, fit, [getattr(p, axis) for p in own], colors[fit.family])
        axes.set_xlabel(label)
        axes.set_ylabel(LOSS)
        axes.grid(alpha=0.3)
        if shown:
            axes.set_xscale("log")
        else:
            axes.text(0.5, 0.5, "none on one rank", ha="center", transform=axes.transAxes)
        if axis == "flops":
            axes.legend(fontsize=8)
    figure.suptitle(f"{plan.experiment.name}: loss, fit and its 95% band", fontsize=10)
    figure.set_layout_engine("constrained")
    figure.savefig(path)


def _draw_law(axes: Any, fit: Fit, xs: Sequence[float], color: str) -> None:
    at = np.geomspace(min(xs), max(xs), 60)[:, None]
    low, high = interval(fit.laws, lambda law: law(at))
    axes.fill_between(at[:, 0], low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(at[:, 0], fit.law(at), color=color, linewidth=1.4)


def draw_curves(plan: Plan, points: Sequence[Point], path: Path) -> None:
    """Draw the training loss over steps and bytes sent at the last size, with bands over seeds."""
    size = [point.size for point in points][-1]
    figure = new_figure(9, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    for place, point in enumerate(point for point in points if point.size == size):
        runs = [run for run in plan.main_runs() if run.family == point.family and run.size == size]
        runs = [r for r in runs if plan.records.get(r.name, {}).get("status") == FINISHED]
        steps, lines = _training_losses([plan.folder(run) for run in runs])
        style: dict[str, Any] = {"color": color_of(point.family, place)}
        sent = np.asarray(steps) * plan.costs[point.family, size].bytes_per_step / 1e6
        for axes, xs in ((left, steps), (right, sent)):
            if np.max(xs) > 0:
                axes.fill_between(xs, lines.min(0), lines.max(0), alpha=0.25, lw=0, **style)
                axes.plot(xs, lines.mean(0), lw=1.3, label=point.family, **style)
    left.set_xlabel("step")
    left.set_ylabel("training loss (nats per token)")
    right.set_xlabel("MB sent per rank")
    if right.lines:
        right.set_xscale("log")
    else:
        right.text(0.5, 0.5, "none on one rank", ha="center", transform=right.transAxes)
    _finish(figure, left, (left, right), f"{plan.experiment.name}: mean and range of seeds")
    figure.savefig(path)


def _training_losses(folders: Sequence[Path]) -> tuple[list[float], Any]:
    """Return the steps that all histories have, and the smoothed losses (seeds, steps)."""
    curves = [series(read_history(folder / HISTORY_FILE), TRAIN_LOSS) for folder in folders]
    count = min(len(steps) for steps, _ in curves)
    return curves[0][0][:count], np.asarray([smoothed(losses)[:count] for _, losses in curves])


def draw_levels(plan: Plan, points: Sequence[Point], path: Path) -> None:
    """Draw the loss over the levels of each group, with bands of the seeds' range."""
    families = plan.experiment.families
    figure = new_figure(6.5, 4.2)
    axes = figure.add_subplot()
    first = next((point for point in points if point.family == _first(plan)), None)
    if first is not None and not _shares_a_line(plan, first.family):
        low, high = min(first.losses), max(first.losses)
        axes.axhspan(low, high, color=color_of(first.family), alpha=0.15, linewidth=0)
        axes.axhline(first.loss, color=color_of(first.family), lw=1.2, ls="--", label=first.family)
    for place, group in enumerate(dict.fromkeys(f.group for f in families.values() if f.group)):
        own = [point for point in points if families[point.family].group == group]
        own.sort(key=lambda point: families[point.family].level)
        if len(own) < 2:
            continue
        xs = [families[point.family].level for point in own]
        style: dict[str, Any] = {"color": color_of(group, place)}
        ends = ([min(p.losses) for p in own], [max(p.losses) for p in own])
        axes.fill_between(xs, *ends, alpha=0.2, linewidth=0, **style)
        axes.plot(xs, [point.loss for point in own], "o-", ms=4, lw=1.3, label=group, **style)
    axes.set_xlabel(plan.experiment.levels)
    axes.set_ylabel(LOSS)
    _finish(figure, axes, (axes,), f"{plan.experiment.name}: mean and range of seeds")
    figure.savefig(path)


def _first(plan: Plan) -> str:
    return plan.experiment.reference or next(iter(plan.experiment.families))


def _shares_a_line(plan: Plan, family: str) -> bool:
    """Return whether a family lies on a line with others."""
    families = plan.experiment.families.values()
    own = plan.experiment.families[family].group
    return bool(own) and sum(other.group == own for other in families) > 1


def _finish(figure: Any, legend: Any, panels: Sequence[Any], title: str) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
    legend.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.set_layout_engine("constrained")
