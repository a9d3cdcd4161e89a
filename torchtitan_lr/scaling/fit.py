# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fit power laws L = E + sum over i of A_i x_i^(-alpha_i) to losses, with bootstrap intervals.

One variable is L(C) = E + A C^(-alpha); two are L(N, D) = E + A N^(-alpha) + B D^(-beta)
(Hoffmann et al., 2022, approach 3). The fit minimizes the Huber loss of the difference of the
logarithms of loss and law, as there. The start is a grid over the exponents, in which E and A_i
follow by linear least squares; then Levenberg and Marquardt's method improves the best starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

HUBER = 1e-2
"""Difference of log L from which a point counts linearly, not squared; 1% of the loss."""

EXPONENTS = np.geomspace(0.02, 2.0, 13)
"""Starting values of an exponent."""

LEAST, MOST = 1e-3, 4.0
"""Limits of an exponent."""

LEVEL = 0.95
"""Probability of an interval."""

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
"""Quantiles .975 of Student's distribution of 1, 2, ... degrees of freedom."""

_STARTS = 3
_STEPS = 100


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Args:
        floor: E, the loss that no x_i reduces.
        factors: A_i for x_i in units of ``units``.
        exponents: alpha_i.
        units: Unit of each x_i, the geometric mean of its values in the fit.
        cost: Mean Huber loss of log L.
    """

    floor: float
    factors: tuple[float, ...]
    exponents: tuple[float, ...]
    units: tuple[float, ...]
    cost: float

    def __call__(self, x: Array) -> Array:
        """Return the losses at the rows of x (points, variables)."""
        scaled = np.asarray(x, dtype=np.float64) / np.asarray(self.units)
        terms = np.asarray(self.factors) * scaled ** -np.asarray(self.exponents)
        return np.asarray(self.floor + terms.sum(axis=1))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """A_i for x_i in units of 1."""
        parts = zip(self.factors, self.units, self.exponents, strict=True)
        return tuple(factor * unit**alpha for factor, unit, alpha in parts)


def fit_law(x: Array, losses: Array, huber: float = HUBER, start: Law | None = None) -> Law:
    """Fit a law to points.

    Args:
        x: Positive values (points, variables).
        losses: Losses (points,), nats per token.
        huber: Difference of log L from which a point counts linearly.
        start: A law near which the minimum is expected, such as that of all points in a bootstrap;
            without it the exponents are searched on a grid.

    Raises:
        ValueError: There are fewer different points than parameters, 1 + 2 per variable.
    """
    x, losses = np.asarray(x, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    if len(np.unique(x, axis=0)) < 1 + 2 * x.shape[1]:
        raise ValueError("fewer different points than parameters")
    units = np.exp(np.log(x).mean(axis=0)) if start is None else np.asarray(start.units)
    logs, target = np.log(x / units), np.log(losses)
    starts = _grid(logs, losses) if start is None else [_pack(start)]
    best = min((_improve(s, logs, target, huber) for s in starts), key=lambda found: found[1])
    theta, cost = best
    n = x.shape[1]
    return Law(
        floor=float(np.exp(theta[0])),
        factors=tuple(np.exp(theta[1 : 1 + n]).tolist()),
        exponents=tuple(np.exp(theta[1 + n :]).tolist()),
        units=tuple(units.tolist()),
        cost=cost,
    )


def _pack(law: Law) -> Array:
    """Return the logarithms of a law's parameters, in which all of them are positive."""
    return np.log(np.maximum([law.floor, *law.factors, *law.exponents], 1e-12))


def _grid(logs: Array, losses: Array) -> list[Array]:
    """Return the best starts, with E and A_i by least squares of relative errors."""
    found = []
    for exponents in product(EXPONENTS, repeat=logs.shape[1]):
        columns = np.column_stack([np.ones(len(logs)), np.exp(-np.asarray(exponents) * logs)])
        weighted = columns / losses[:, None]
        solution = np.linalg.lstsq(weighted, np.ones(len(logs)), rcond=None)[0]
        if solution[0] < 0:  # no negative floor: the rest alone
            rest = np.linalg.lstsq(weighted[:, 1:], np.ones(len(logs)), rcond=None)[0]
            solution = np.concatenate([[0.0], rest])
        solution = np.maximum(solution, 1e-6 * losses.min())
        error = float(((weighted @ solution - 1) ** 2).sum())
        found.append((error, np.log(np.concatenate([solution, exponents]))))
    found.sort(key=lambda item: item[0])
    return [start for _, start in found[:_STARTS]]


def _improve(theta: Array, logs: Array, target: Array, huber: float) -> tuple[Array, float]:
    """Minimize from one start; return the parameters' logarithms and the mean Huber loss."""
    n = logs.shape[1]
    low = np.log(np.r_[1e-9, np.full(n, 1e-9), np.full(n, LEAST)])
    high = np.log(np.r_[1e3, np.full(n, 1e3), np.full(n, MOST)])
    damping, cost = 1e-2, _cost(_residual(theta, logs, target), huber)
    for _ in range(_STEPS):
        residual = _residual(theta, logs, target)
        weight = np.minimum(1.0, huber / np.maximum(np.abs(residual), 1e-30))
        jacobian = _jacobian(theta, logs)
        normal = jacobian.T @ (weight[:, None] * jacobian)
        gradient = jacobian.T @ (weight * residual)
        scale = np.diag(np.diag(normal) + 1e-12)
        step = np.linalg.lstsq(normal + damping * scale, gradient, rcond=None)[0]
        tried = np.clip(theta - np.clip(step, -1.0, 1.0), low, high)
        after = _cost(_residual(tried, logs, target), huber)
        if after < cost:
            done = cost - after < 1e-10 * cost
            theta, cost, damping = tried, after, max(damping / 4, 1e-9)
            if done:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return theta, cost


def _terms(theta: Array, logs: Array) -> Array:
    """Return E and each A_i x_i^(-alpha_i), (points, 1 + variables)."""
    n = logs.shape[1]
    powers = np.exp(theta[1 : 1 + n] - np.exp(theta[1 + n :]) * logs)
    return np.column_stack([np.full(len(logs), np.exp(theta[0])), powers])


def _residual(theta: Array, logs: Array, target: Array) -> Array:
    return np.asarray(np.log(_terms(theta, logs).sum(axis=1)) - target)


def _jacobian(theta: Array, logs: Array) -> Array:
    """Return the derivatives of the logarithm of the law by theta."""
    terms = _terms(theta, logs)
    shares = terms / terms.sum(axis=1, keepdims=True)
    exponents = np.exp(theta[1 + logs.shape[1] :])
    return np.column_stack([shares, -shares[:, 1:] * exponents * logs])


def _cost(residual: Array, huber: float) -> float:
    size = np.abs(residual)
    return float(np.where(size <= huber, size**2 / 2, huber * (size - huber / 2)).mean())


def bootstrap(
    x: Array, losses: Sequence[Sequence[float]], draws: int, seed: int = 0, huber: float = HUBER
) -> list[Law]:
    """Fit a law to resampled points: points with replacement, and seeds within each point.

    Args:
        x: Values (points, variables).
        losses: Losses of every seed, by point.
        draws: Number of resamples. Those with too few different points are drawn again.
        seed: Of the resampling.
        huber: As in `fit_law`.
    """
    generator = np.random.default_rng(seed)
    x = np.asarray(x, dtype=np.float64)
    whole = fit_law(x, np.asarray([np.mean(values) for values in losses]), huber)
    laws: list[Law] = []
    for _ in range(20 * draws):
        if len(laws) == draws:
            break
        chosen = generator.integers(0, len(x), len(x))
        means = [np.mean(generator.choice(losses[i], len(losses[i]))) for i in chosen]
        try:
            laws.append(fit_law(x[chosen], np.asarray(means), huber, whole))
        except ValueError:
            continue
    return laws


def interval(laws: Sequence[Law], value: Callable[[Law], Any]) -> tuple[Any, Any]:
    """Return the interval of a value over bootstrap laws, of probability `LEVEL`.

    Args:
        laws: Returned by `bootstrap`.
        value: Number or array of a law.
    """
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.asarray([value(law) for law in laws]), edges, axis=0)
    return low, high


def student(freedom: int) -> float:
    """Return the quantile .975 of Student's distribution.

    Args:
        freedom: Degrees of freedom, at least 1; beyond 13 the value is good to 0.2%.
    """
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.37 / freedom + 2.8 / freedom**2
