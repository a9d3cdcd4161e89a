# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fit L(C) = E + A C^(-alpha) by the Huber loss of log L (Hoffmann et al., 2022, approach 3).

Intervals of a law are percentiles of bootstrap fits to resampled points; intervals of a mean over
seeds are Student's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

Array = np.ndarray[Any, np.dtype[np.float64]]

HUBER = 1e-3
"""Difference of log L from which a point counts linearly, not squared (Hoffmann et al., D.2)."""

LEVEL = 0.95
"""Probability of an interval."""

_LOW, _HIGH = np.asarray([-14.0, -14.0, 1e-3]), np.asarray([14.0, 14.0, 4.0])
"""Limits of log E, log A and alpha; exp(-14) is no floor, or no such term."""


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Args:
        floor: E, the loss that no compute reduces, nats per token.
        factor: A: the loss that remains above it at ``unit``.
        alpha: The exponent.
        unit: Unit of C in FLOPs, the geometric mean of the fitted points.
    """

    floor: float
    factor: float
    alpha: float
    unit: float

    def __call__(self, flops: Array) -> Array:
        """Return the losses (points,) at C (points,)."""
        return np.asarray(self.floor + self.factor * (flops / self.unit) ** -self.alpha)


def fit_law(flops: Array, losses: Array, start: Law | None = None) -> Law:
    """Fit a law to points.

    Args:
        flops: C (points,), of at least three different values.
        losses: Losses (points,), nats per token.
        start: A law near which the minimum is expected, such as that of all points in a bootstrap;
            without it several exponents are tried.
    """
    unit = float(np.exp(np.log(flops).mean())) if start is None else start.unit
    logs = np.log(flops / unit)

    def residual(theta: Array) -> Array:
        return np.asarray(
            np.log(np.exp(theta[0]) + np.exp(theta[1] - theta[2] * logs)) - np.log(losses)
        )

    if start is None:
        starts = []
        for alpha in np.geomspace(0.02, 2.0, 7):
            # E and A by least squares of relative errors, not negative.
            columns = np.column_stack([np.ones(len(logs)), np.exp(-alpha * logs)])
            solution, _ = optimize.nnls(columns / losses[:, None], np.ones(len(logs)))
            starts.append([*np.log(np.maximum(solution, 1e-6)), alpha])
    else:
        starts = [[np.log(start.floor), np.log(start.factor), start.alpha]]
    bounds, found = (_LOW, _HIGH), []
    for theta in np.clip(starts, _LOW, _HIGH):
        found.append(
            optimize.least_squares(residual, theta, bounds=bounds, loss="huber", f_scale=HUBER)
        )
    theta = min(found, key=lambda result: float(result.cost)).x
    return Law(float(np.exp(theta[0])), float(np.exp(theta[1])), float(theta[2]), unit)


def bootstrap(flops: Array, losses: Array, draws: int = 500, seed: int = 0) -> list[Law]:
    """Fit a law to points drawn with replacement.

    Args:
        flops: C (points,).
        losses: Losses (points,).
        draws: Number of resamples; those with fewer than three different C are left out.
        seed: Of the resampling.
    """
    generator, whole, laws = np.random.default_rng(seed), fit_law(flops, losses), []
    for _ in range(draws):
        chosen = generator.integers(0, len(flops), len(flops))
        if len(np.unique(flops[chosen])) >= 3:
            laws.append(fit_law(flops[chosen], losses[chosen], whole))
    return laws


def percentiles(laws: Sequence[Law], value: Callable[[Law], Any]) -> tuple[Any, Any]:
    """Return the interval of a number or array of a law over bootstrap laws, of `LEVEL`."""
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.asarray([value(law) for law in laws]), edges, axis=0)
    return low, high


def student(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean of values and its interval by Student's t; no interval for one value.

    Args:
        values: Losses of seeds; or differences of losses paired by seed, in which what seeds share
            cancels (the order of the data).
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values))
    return mean, mean - half, mean + half
