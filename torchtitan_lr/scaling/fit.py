# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fit power laws to losses by the Huber loss of log L (Hoffmann et al., 2022, approach 3).

One variable is L(C) = E + A C^(-alpha); two are L(N, D) = E + A N^(-alpha) + B D^(-beta).
Intervals of a law are percentiles of bootstrap fits to resampled points; intervals of a mean over
seeds are Student's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import optimize, stats

Array = np.ndarray[Any, np.dtype[np.float64]]

HUBER = 1e-3
"""Difference of log L from which a point counts linearly, not squared (Hoffmann et al., D.2)."""

LEVEL = 0.95
"""Probability of an interval."""

EXPONENTS = np.geomspace(0.02, 2.0, 13)
"""Starting values of an exponent."""

_LEAST, _MOST = 1e-3, 4.0  # limits of an exponent
_STARTS = 3


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Args:
        floor: E, the loss that no x_i reduces, nats per token.
        factors: A, B: the loss that each x_i adds at its unit.
        exponents: alpha, beta.
        units: Unit of each x_i, the geometric mean of its values in the fit.
    """

    floor: float
    factors: tuple[float, ...]
    exponents: tuple[float, ...]
    units: tuple[float, ...]

    def __call__(self, x: Array) -> Array:
        """Return the losses (points,) at the rows of x (points, variables)."""
        powers = (np.asarray(x, dtype=float) / self.units) ** -np.asarray(self.exponents)
        return np.asarray(self.floor + powers @ np.asarray(self.factors))


def fit_law(x: Array, losses: Array, start: Law | None = None) -> Law:
    """Fit a law to points.

    Args:
        x: Positive values (points, variables).
        losses: Losses (points,), nats per token.
        start: A law near which the minimum is expected, such as that of all points in a bootstrap;
            without it the exponents are searched on a grid.

    Raises:
        ValueError: There are fewer different points than parameters, 1 + 2 per variable.
    """
    x, losses = np.asarray(x, dtype=float), np.asarray(losses, dtype=float)
    n = x.shape[1]
    if len(np.unique(x, axis=0)) < 1 + 2 * n:
        raise ValueError("fewer different points than parameters")
    units = np.exp(np.log(x).mean(axis=0)) if start is None else np.asarray(start.units)
    logs = np.log(x / units)

    def residual(theta: Array) -> Array:
        terms = np.exp(theta[1 : 1 + n] - theta[1 + n :] * logs).sum(axis=1)
        return np.asarray(np.log(np.exp(theta[0]) + terms) - np.log(losses))

    low = [-14.0] * (1 + n) + [_LEAST] * n  # exp(-14): no floor, or no such term
    high = [14.0] * (1 + n) + [_MOST] * n
    if start is None:
        starts = _starts(logs, losses)
    else:  # log E, log A_i, alpha_i
        starts = [np.asarray([*np.log([start.floor, *start.factors]), *start.exponents])]
    found = [
        optimize.least_squares(
            *(residual, np.clip(theta, low, high)), bounds=(low, high), loss="huber", f_scale=HUBER
        )
        for theta in starts
    ]
    theta = min(found, key=lambda result: float(result.cost)).x
    factors = tuple(np.exp(theta[1 : 1 + n]).tolist())
    exponents = tuple(theta[1 + n :].tolist())
    return Law(float(np.exp(theta[0])), factors, exponents, tuple(units.tolist()))


def _starts(logs: Array, losses: Array) -> list[Array]:
    """Return the best exponents of a grid, with E and A_i by least squares of relative errors."""
    found = []
    for exponents in product(EXPONENTS, repeat=logs.shape[1]):
        columns = np.column_stack([np.ones(len(logs)), np.exp(-np.asarray(exponents) * logs)])
        solution, error = optimize.nnls(columns / losses[:, None], np.ones(len(logs)))
        found.append((error, [*np.log(np.maximum(solution, 1e-6)), *exponents]))
    return [np.asarray(theta) for _, theta in sorted(found)[:_STARTS]]


def bootstrap(x: Array, losses: Array, draws: int = 500, seed: int = 0) -> list[Law]:
    """Fit a law to points drawn with replacement.

    Args:
        x: Values (points, variables).
        losses: Losses (points,).
        draws: Number of resamples; those with too few different points are left out.
        seed: Of the resampling.
    """
    generator, whole, laws = np.random.default_rng(seed), fit_law(x, losses), []
    for _ in range(draws):
        chosen = generator.integers(0, len(x), len(x))
        if len(np.unique(x[chosen], axis=0)) >= 1 + 2 * x.shape[1]:
            laws.append(fit_law(x[chosen], losses[chosen], whole))
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
