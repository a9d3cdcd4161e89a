# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Choose learning rates: the best of a grid at the searched sizes, a stated rule beyond them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchtitan_lr.scaling.costs import Cost
from torchtitan_lr.scaling.experiment import Experiment


@dataclass(frozen=True)
class Search:
    """The search of a family at a size, as far as it has come.

    Args:
        grid: The values, those added beyond an edge included.
        missing: Values without a result.
        best: The value of least loss, if it lies inside the grid.
        edge: The value of least loss, if it is an edge of the grid and the grid may not grow.
        losses: Validation loss by value; infinite for a run that diverged.
    """

    grid: list[float]
    missing: list[float]
    best: float | None
    edge: float | None
    losses: dict[float, float]


def search(grid: list[float], losses: Mapping[float, float], extend: int) -> Search:
    """Return the state of a search.

    Args:
        grid: Values in ascending order; one value needs no search.
        losses: Validation loss by value; infinite for a run that diverged.
        extend: How often the grid may grow by one value.
    """
    if len(grid) == 1:
        return Search(grid, [], grid[0], None, {})
    grid = list(grid)
    while True:
        missing = [rate for rate in grid if rate not in losses]
        known = {rate: losses[rate] for rate in grid if rate in losses}
        if missing:
            return Search(grid, missing, None, None, known)
        best = min(grid, key=lambda rate: losses[rate])
        if grid[0] < best < grid[-1] and math.isfinite(losses[best]):
            return Search(grid, [], best, None, known)
        if extend == 0 or not math.isfinite(losses[best]):
            return Search(grid, [], None, best, known)
        extend -= 1
        if best == grid[0]:
            grid.insert(0, _rounded(grid[0] ** 2 / grid[1]))
        else:
            grid.append(_rounded(grid[-1] ** 2 / grid[-2]))


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


@dataclass(frozen=True)
class Chosen:
    """The learning rate of a family at a size.

    Args:
        rate: The value; None while it is unknown, or if an edge is no best.
        how: ``stated``, ``searched`` or the rule's name.
        search: The search at this size; None beyond the searched sizes.
    """

    rate: float | None
    how: str
    search: Search | None


def choose(
    experiment: Experiment,
    costs: Mapping[tuple[str, str], Cost],
    losses_of: Callable[[str, str], Mapping[float, float]],
) -> dict[tuple[str, str], Chosen]:
    """Choose every learning rate that the finished runs determine.

    Args:
        experiment: The experiment.
        costs: Cost by family and size.
        losses_of: Returns the losses of a family's search at a size by learning rate.
    """
    chosen: dict[tuple[str, str], Chosen] = {}
    for family in (name for name, arm in experiment.families.items() if not arm.rate_of):
        grid, extend = experiment.grid_of(family), experiment.learning_rate.extend
        for size in experiment.searched:
            state = search(grid, losses_of(family, size), extend)
            how = "stated" if len(grid) == 1 else "searched"
            chosen[family, size] = Chosen(state.best, how, state)
        for size in experiment.sizes:
            if (family, size) not in chosen:
                chosen[family, size] = _by_rule(experiment, costs, chosen, family, size)
    for family, arm in experiment.families.items():
        for size in experiment.sizes if arm.rate_of else ():
            rate = chosen[arm.rate_of, size].rate
            chosen[family, size] = Chosen(rate, f"that of {arm.rate_of}", None)
    return chosen


def _by_rule(
    experiment: Experiment,
    costs: Mapping[tuple[str, str], Cost],
    chosen: Mapping[tuple[str, str], Chosen],
    family: str,
    size: str,
) -> Chosen:
    rule = experiment.learning_rate.rule
    own = costs[family, size]
    found = []
    for searched in experiment.searched:
        rate = chosen[family, searched].rate
        if rate is None:
            return Chosen(None, rule, None)
        found.append((costs[family, searched], rate))
    largest, rate = max(found, key=lambda item: item[0].counted)
    if rule == "width":
        rate *= largest.width / own.width
    elif rule == "power":
        rate = _on_line([(cost.counted, value) for cost, value in found], own.counted)
    return Chosen(_rounded(rate), rule, None)


def _on_line(points: list[tuple[int, float]], at: int) -> float:
    """Return the value at N of the line through log(rate) over log(N), by least squares."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(rate) for _, rate in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((a - x) ** 2 for a in xs)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0
    return math.exp(y + slope * (math.log(at) - x))
