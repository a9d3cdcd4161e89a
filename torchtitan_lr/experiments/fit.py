# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fit L(C) = E + A C^(-alpha) by the Huber loss of log L (Hoffmann et al., 2022, approach 3).

A law's intervals are percentiles of bootstrap fits; those of a mean over seeds are Student's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

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
