# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compare families at equal parameters, by interpolation between the sizes that were trained.

Two families have no size of the same N. So a family's loss at the N of a reference's point is
interpolated: over log N along each budget, then over log C between the budgets. Nothing is
extrapolated. The loss is a weighted mean of at most four points, which gives its interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np

from torchtitan_lr.scaling.fit import student
from torchtitan_lr.scaling.points import Point

_EQUAL = 0.01
"""Relative difference of FLOPs up to which they count as equal."""


@dataclass(frozen=True)
class Mix:
    """A weighted mean of a family's points.

    Args:
        parts: Points with their weights, which sum to 1.
    """

    parts: tuple[tuple[float, Point], ...]

    def log_mean(self, name: str) -> float:
        """Return the weighted geometric mean of an attribute of the points."""
        return exp(sum(weight * log(getattr(point, name)) for weight, point in self.parts))

    @property
    def loss(self) -> float:
        """Weighted mean of the losses, nats per token."""
        return sum(weight * point.loss for weight, point in self.parts)

    @property
    def variance(self) -> float:
        """Variance of `loss` in units of one seed's."""
        return sum(weight**2 / len(point.seeds) for weight, point in self.parts)


def _between(low: Mix, high: Mix, share: float) -> Mix:
    """Return the mean of two with the weights 1 - share and share."""
    parts = [((1 - share) * weight, point) for weight, point in low.parts]
    parts += [(share * weight, point) for weight, point in high.parts]
    return Mix(tuple(part for part in parts if part[0] > 0))


def _at(mixes: Sequence[Mix], name: str, value: float) -> Mix:
    """Interpolate over the logarithm of an attribute; outside its range return the nearest end."""
    ordered = sorted(mixes, key=lambda mix: mix.log_mean(name))
    places = [log(mix.log_mean(name)) for mix in ordered]
    at = float(np.interp(log(value), places, np.arange(len(places))))
    below = min(int(at), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return _between(ordered[below], ordered[above], at - below)


def mix_at(points: Sequence[Point], parameters: float, flops: float) -> Mix | None:
    """Interpolate a family at some parameters, at the FLOPs that are nearest to the wanted ones.

    Args:
        points: Of one family.
        parameters: N.
        flops: C wanted. Where no budget reaches it at this N, the nearest budget is taken.

    Returns:
        The mean of the points around; None where N is outside the sizes of every budget.
    """
    budgets: dict[float, list[Point]] = {}
    for point in points:
        budgets.setdefault(point.budget, []).append(point)
    found = []
    for own in budgets.values():
        sizes = [point.parameters for point in own]
        if min(sizes) <= parameters <= max(sizes):
            found.append(_at([Mix(((1.0, point),)) for point in own], "parameters", parameters))
    return _at(found, "flops", flops) if found else None


def seed_spread(points: Sequence[Point]) -> tuple[float, int]:
    """Return the standard deviation between seeds, pooled over all points, and its freedom.

    Args:
        points: All points; those of one seed do not count.
    """
    several = [np.asarray(point.losses) for point in points if len(point.seeds) > 1]
    freedom = sum(len(losses) - 1 for losses in several)
    squares = sum(float(((losses - losses.mean()) ** 2).sum()) for losses in several)
    return ((squares / freedom) ** 0.5, freedom) if freedom else (0.0, 0)


def at_equal_parameters(points: Sequence[Point], reference: str) -> list[dict[str, Any]]:
    """Compare each family with the reference at equal parameters.

    For each N of the reference that lies between the sizes of a family, the row is that of the
    reference's budget whose FLOPs the family comes nearest to; several rows if FLOPs are equal.

    Args:
        points: All points.
        reference: The family whose sizes, at least two, give N.

    Returns:
        Rows with ``family``, ``parameters``, ``budget`` (the reference's), the ratios ``flops``
        and ``tokens`` to the reference's, ``loss``, and the ``difference`` of losses with its 95%
        interval ``low``, ``high``: Student's, from the spread that all points share. They are None
        where no point has several seeds.
    """
    spread, freedom = seed_spread(points)
    rows: list[dict[str, Any]] = []
    if len({point.parameters for point in points if point.family == reference}) < 2:
        return rows
    for family in dict.fromkeys(p.family for p in points if p.family != reference):
        own = [point for point in points if point.family == family]
        of_size: dict[int, list[dict[str, Any]]] = {}
        for first in (point for point in points if point.family == reference):
            mix = mix_at(own, first.parameters, first.flops)
            if mix is None:
                continue
            row = {"family": family, "parameters": first.parameters, "budget": first.budget}
            for name in ("flops", "tokens"):
                row[name] = mix.log_mean(name) / getattr(first, name)
            row |= {"loss": mix.loss, "difference": mix.loss - first.loss, "low": None}
            row["high"] = None
            if freedom:
                error = spread * (mix.variance + 1 / len(first.seeds)) ** 0.5
                half = student(freedom) * error
                row |= {"low": row["difference"] - half, "high": row["difference"] + half}
            of_size.setdefault(first.parameters, []).append(row)
        for found in of_size.values():
            nearest = min(abs(log(row["flops"])) for row in found)
            rows += [row for row in found if abs(log(row["flops"])) < nearest + _EQUAL]
    return rows
