# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The points of an experiment, one per family, size and budget, and the laws fitted to them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from torchtitan_lr.scaling.fit import HUBER, Law, bootstrap, fit_law, interval
from torchtitan_lr.scaling.plan import FINISHED, Plan

AXES = {
    "flops": "training FLOPs",
    "parameters": "parameters N",
    "bytes": "bytes sent per rank",
    "seconds": "modelled seconds",
}
"""Attributes of a point against which the loss is drawn, with their labels."""


@dataclass(frozen=True)
class Point:
    """A family at a size and budget.

    Args:
        family: Name of the family.
        size: Name of the size.
        budget: Tokens per parameter.
        rate: Learning rate.
        parameters: N.
        tokens: D.
        flops: C, of all ranks.
        bytes: Bytes that the busiest rank passes to its collectives.
        seconds: Modelled time of the steps.
        seeds: Validation loss of every finished seed, nats per token.
        wanted: Number of seeds of the experiment.
    """

    family: str
    size: str
    budget: float
    rate: float
    parameters: int
    tokens: float
    flops: float
    bytes: float
    seconds: float
    seeds: dict[int, float] = field(default_factory=dict)
    wanted: int = 1

    @property
    def losses(self) -> list[float]:
        """The losses in the order of the seeds."""
        return list(self.seeds.values())

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.losses))


def points_of(plan: Plan) -> list[Point]:
    """Return the points that have at least one finished run."""
    found: dict[tuple[str, str, float], Point] = {}
    for run in plan.main_runs():
        record = plan.records.get(run.name, {})
        if run.rate is None or record.get("status") != FINISHED:
            continue
        cost, steps = plan.costs[run.family, run.size], plan.steps(run)
        point = Point(
            family=run.family,
            size=run.size,
            budget=run.budget,
            rate=run.rate,
            parameters=cost.counted,
            tokens=plan.tokens(run),
            flops=plan.flops(run),
            bytes=cost.bytes_per_step * steps,
            seconds=cost.seconds_per_step * steps,
            wanted=len(plan.experiment.seeds_of(run.size)),
        )
        point = found.setdefault((run.family, run.size, run.budget), point)
        point.seeds[run.seed] = record["row"]["val_loss"]
    return list(found.values())


def frontier(points: Sequence[Point], axis: str) -> list[Point]:
    """Return the points that no other one beats: less of the axis and less loss.

    Args:
        points: Of one family.
        axis: One of `AXES`.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (getattr(p, axis), p.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


@dataclass(frozen=True)
class Fit:
    """A law of a family with its bootstrap.

    Args:
        family: Name of the family.
        axes: Its variables, attributes of `Point`.
        law: The fit to the means over seeds.
        laws: Fits to resampled points and seeds.
        points: Number of points.
    """

    family: str
    axes: tuple[str, ...]
    law: Law
    laws: list[Law]
    points: int

    def values(self) -> dict[str, tuple[float, float, float]]:
        """Return E, the exponents and the coefficients: value and interval, by name."""
        names = ("alpha", "beta")[: len(self.axes)]
        getters: dict[str, Callable[[Law], float]] = {"E": lambda law: law.floor}
        for i, name in enumerate(names):
            getters[name] = lambda law, i=i: law.exponents[i]  # type: ignore[misc]
            getters["AB"[i]] = lambda law, i=i: law.coefficients[i]  # type: ignore[misc]
        found = {}
        for name, getter in getters.items():
            low, high = interval(self.laws, getter)
            found[name] = (getter(self.law), float(low), float(high))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the fit as JSON."""
        values = {
            name: {"value": value, "low": low, "high": high}
            for name, (value, low, high) in self.values().items()
        }
        units = dict(zip(self.axes, self.law.units, strict=True))
        return {"family": self.family, "axes": list(self.axes), "points": self.points} | {
            "units": units,
            "law": asdict(self.law),
            "values": values,
        }


def fit_family(
    family: str,
    points: Sequence[Point],
    axes: tuple[str, ...],
    draws: int,
    huber: float = HUBER,
    whole: bool = False,
) -> Fit | None:
    """Fit the law of a family, None where its points do not allow it.

    Args:
        family: Name of the family.
        points: Its points.
        axes: The variables. Along one, only the `frontier` counts; along N and D all points do, if
            they are a grid: three of each at least, and more than one ratio.
        draws: Number of bootstrap fits.
        huber: Difference of log L from which a point counts linearly.
        whole: Fit all points along one variable too.
    """
    used = list(points)
    if len(axes) == 1:
        used = used if whole else frontier(points, axes[0])
    elif len({p.parameters for p in used}) < 3 or len({p.budget for p in used}) < 2:
        return None
    x = np.asarray([[getattr(p, axis) for axis in axes] for p in used], dtype=np.float64)
    # One more than the parameters: an exact fit has no error to speak of.
    if len(used) < 2 + 2 * len(axes) or len(np.unique(x, axis=0)) < 2 + 2 * len(axes):
        return None
    if x.min() <= 0:
        return None
    law = fit_law(x, np.asarray([p.loss for p in used]), huber)
    laws = bootstrap(x, [p.losses for p in used], draws, huber=huber)
    return Fit(family, axes, law, laws, len(used)) if laws else None


def compare(fits: Sequence[Fit], points: Sequence[Point], axis: str) -> list[dict[str, Any]]:
    """Compare families at equal cost, within the range that both have points in.

    Args:
        fits: Laws along the axis.
        points: All points.
        axis: One of `AXES`.

    Returns:
        A row for each pair, at the least, the middle and the greatest common cost: ``first``,
        ``second``, ``at``, the ``difference`` of losses (first - second) with its interval
        ``low, high``, and ``first_is_lower``, the share of bootstrap fits in which it is.
    """
    rows = []
    for one, two in combinations(fits, 2):
        ranges = [[getattr(p, axis) for p in points if p.family == f.family] for f in (one, two)]
        low, high = max(map(min, ranges)), min(map(max, ranges))
        if low >= high:
            continue
        for at in (low, (low * high) ** 0.5, high):
            x = np.asarray([[at]])
            count = min(len(one.laws), len(two.laws))
            pairs = zip(one.laws[:count], two.laws[:count], strict=True)
            drawn = np.asarray([(a(x) - b(x))[0] for a, b in pairs])
            edges = np.quantile(drawn, [0.025, 0.975])
            rows.append(
                {
                    "first": one.family,
                    "second": two.family,
                    "at": float(at),
                    "difference": float((one.law(x) - two.law(x))[0]),
                    "low": float(edges[0]),
                    "high": float(edges[1]),
                    "first_is_lower": float((drawn < 0).mean()),
                }
            )
    return rows
