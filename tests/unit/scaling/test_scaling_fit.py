# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The fit finds the exponents of a law that made the losses, and no other ones."""

import math

import numpy as np
import pytest

from torchtitan_lr.scaling.fit import bootstrap, fit_law, interval
from torchtitan_lr.scaling.points import Point, compare, fit_family, frontier

NOISE = 0.003  # standard deviation of log L, about that of seeds


def noisy(losses, seeds=3, seed=0):
    noise = np.random.default_rng(seed).standard_normal((len(losses), seeds))
    return [list(row) for row in np.asarray(losses)[:, None] * np.exp(NOISE * noise)]


def points(exponent, floor=1.8, factor=3.0, family="a", seed=0):
    """Eight sizes with FLOPs from 1e12 to 1e16."""
    flops = np.geomspace(1e12, 1e16, 8)
    losses = noisy(floor + factor * (flops / 1e12) ** -exponent, seed=seed)
    return [
        Point(
            *(family, f"s{i}", 20.0, 1e-3, int(c**0.5), 1.0, c, 0.0, c / 1e9),
            seeds=dict(enumerate(own)),
        )
        for i, (c, own) in enumerate(zip(flops, losses, strict=True))
    ]


@pytest.mark.parametrize("exponent", [0.15, 0.3])
def test_the_true_exponent_is_in_the_interval(exponent):
    fit = fit_family("a", points(exponent), ("flops",), draws=200)
    value, low, high = fit.values()["alpha"]
    assert low < exponent < high and high - low < 0.1
    assert value == pytest.approx(exponent, abs=0.03)
    # The control: another exponent's interval does not hold it.
    _, low, high = fit_family("a", points(exponent + 0.15), ("flops",), 200).values()["alpha"]
    assert not low < exponent < high


def test_without_noise_the_law_is_found_in_units_of_one():
    x = np.geomspace(1e12, 1e16, 8)[:, None]
    law = fit_law(x, 1.5 + 400 * x[:, 0] ** -0.2)
    assert law.floor == pytest.approx(1.5, rel=1e-5)
    assert (*law.coefficients, *law.exponents) == pytest.approx((400, 0.2), rel=1e-3)


def test_one_wrong_point_hardly_moves_the_fit():
    x = np.geomspace(1e12, 1e16, 12)[:, None]
    losses = 1.5 + 3 * (x[:, 0] / 1e12) ** -0.2
    losses[5] *= 1.2
    robust, squares = fit_law(x, losses), fit_law(x, losses, huber=1e3)
    assert robust.exponents[0] == pytest.approx(0.2, abs=0.01)
    assert abs(squares.exponents[0] - 0.2) > 0.01


def test_parameters_and_tokens():
    x = np.asarray([(n, n * ratio) for n in np.geomspace(2e5, 8e6, 5) for ratio in (5, 20, 80)])
    losses = noisy(1.7 + 20 * x[:, 0] ** -0.2 + 90 * x[:, 1] ** -0.3)
    laws = bootstrap(x, losses, 60)
    for i, (exponent, other) in enumerate([(0.2, 0.4), (0.3, 0.5)]):
        low, high = interval(laws, lambda law, i=i: law.exponents[i])
        assert low < exponent < high < other


def test_what_no_law_can_be_fitted_to():
    few = points(0.2)[:3]
    assert fit_family("a", few, ("flops",), 20) is None
    assert fit_family("a", points(0.2), ("bytes",), 20) is None  # none are sent
    assert fit_family("a", points(0.2), ("parameters", "tokens"), 20) is None  # one ratio
    with pytest.raises(ValueError, match="fewer different points"):
        fit_law(np.ones((5, 1)), np.ones(5))


def test_a_dearer_and_worse_point_is_not_on_the_frontier():
    given = points(0.2)
    worse = Point("a", "x", 5.0, 1e-3, 1, 1.0, 1e15, 0.0, 1.0, {0: given[0].loss})
    assert frontier([*given, worse], "flops") == given


def test_families_are_compared_at_equal_flops():
    given = [*points(0.2), *points(0.3, family="b", seed=1)]
    fits = [fit_family(f, [p for p in given if p.family == f], ("flops",), 100) for f in "ab"]
    rows = compare(fits, given, "flops")
    assert [row["first"] + row["second"] for row in rows] == ["ab"] * 3
    last = rows[-1]
    assert last["first_is_lower"] == 0 and 0 < last["low"] < last["difference"] < last["high"]
    true = 3 * (1e4**-0.2 - 1e4**-0.3)
    assert math.isclose(last["difference"], true, abs_tol=0.05)
