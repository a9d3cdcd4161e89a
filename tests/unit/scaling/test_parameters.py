# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Families at equal parameters: interpolated losses and their intervals, of points of a law."""

from math import log

import numpy as np
import pytest

from torchtitan_lr.scaling.parameters import at_equal_parameters, mix_at, seed_spread
from torchtitan_lr.scaling.points import Point
from torchtitan_lr.scaling.report import parameters_table


def plane(n, flops):
    """A loss that is linear in log N and log C, so that interpolation is exact."""
    return 9.0 - 0.2 * log(n) - 0.1 * log(flops)


def points(family, sizes, budgets, law=plane, offset=0.0, noise=None, seeds=3):
    """Points of a family: C = 6 N D with D = budget x N."""
    found = []
    for i, n in enumerate(sizes):
        for budget in budgets:
            flops = 6.0 * budget * n * n
            spread = np.zeros(seeds) if noise is None else 0.1 * noise.standard_normal(seeds)
            losses = dict(enumerate((law(n, flops) + offset + spread).tolist()))
            point = Point(family, f"s{i}", budget, 1e-3, n, budget * n, flops, 0.0, 1.0, losses)
            found.append(point)
    return found


FULL = points("full", [100, 200, 400, 800], [10.0, 20.0])


def test_losses_at_equal_parameters_and_flops():
    """Other sizes and budgets of the same law differ by nothing but their offset."""
    low = points("cola", [90, 150, 330, 500], [8.0, 30.0], offset=-0.3)
    rows = at_equal_parameters([*FULL, *low], "full")
    # 800 is beyond the largest size; both budgets are reached at every other one.
    assert [(row["parameters"], row["budget"]) for row in rows] == [
        (n, budget) for n in (100, 200, 400) for budget in (10.0, 20.0)
    ]
    for row in rows:
        assert row["flops"] == pytest.approx(1) and row["difference"] == pytest.approx(-0.3)
        assert row["tokens"] == pytest.approx(1)
    # The control: at the family's own sizes the difference is another one.
    assert plane(150, 6 * 8 * 150**2) - plane(100, 6 * 10 * 100**2) < -0.1


def test_budgets_that_do_not_meet_are_named():
    """No extrapolation: the nearest FLOPs are taken, and their ratio is told."""
    low = points("lax", [50, 160, 420], [80.0, 160.0])
    rows = at_equal_parameters([*FULL, *low], "full")
    assert [(row["parameters"], row["budget"]) for row in rows] == [
        (n, 20.0) for n in (100, 200, 400)
    ]
    for row in rows:
        assert row["flops"] == pytest.approx(4) and row["tokens"] == pytest.approx(4)
        assert row["difference"] == pytest.approx(-0.1 * log(4))
    text = parameters_table(rows, "full")
    assert "| 100 | lax | 4.00 | 4.00 |" in text and "-0.139 [-0.139, -0.139]" in text


def test_what_cannot_be_compared():
    assert mix_at(FULL, 99, 1e6) is None and mix_at(FULL, 801, 1e6) is None
    assert mix_at(FULL, 100, 1e9).parts == ((1.0, FULL[1]),)
    assert at_equal_parameters([*FULL, *points("b", [801, 900], [10.0])], "full") == []
    one = points("full", [100], [10.0])
    assert at_equal_parameters([*one, *points("b", [100], [10.0])], "full") == []


def test_a_curve_between_two_sizes():
    """A power law is no line; between sizes and budgets of a ratio of 2 the error is small."""
    low = points("b", [140, 280, 560], [10.0, 20.0], law=lambda n, c: 1.7 + 30 * c**-0.2)
    rows = at_equal_parameters([*FULL, *low], "full")
    for row in rows:
        flops = 6 * row["budget"] * row["parameters"] ** 2 * row["flops"]
        assert row["loss"] == pytest.approx(1.7 + 30 * flops**-0.2, abs=0.02)


def test_the_interval_covers_the_truth():
    generator = np.random.default_rng(0)
    inside, narrow, count = 0, 0, 0
    for _ in range(150):
        full = points("full", [100, 200, 400], [10.0], noise=generator)
        low = points("b", [80, 170, 500], [10.0], noise=generator, offset=0.2)
        for row in at_equal_parameters([*full, *low], "full"):
            true, half = 0.2, row["high"] - row["difference"]
            # At another C the family's loss is that of its C.
            true -= 0.1 * log(row["flops"])
            inside += abs(row["difference"] - true) <= half
            narrow += abs(row["difference"] - true) <= half / 2
            count += 1
    assert count == 450 and 0.92 < inside / count < 0.98
    assert narrow / count < 0.8  # the control


def test_the_spread_of_seeds():
    two = [
        Point("a", "s", 1.0, 1.0, 1, 1.0, 1.0, 0.0, 0.0, {0: 1.0, 1: 3.0}),
        Point("a", "t", 1.0, 1.0, 2, 1.0, 1.0, 0.0, 0.0, {0: 5.0, 1: 5.0}),
        Point("a", "u", 1.0, 1.0, 3, 1.0, 1.0, 0.0, 0.0, {0: 9.0}),
    ]
    assert seed_spread(two) == (1.0, 2)
    assert seed_spread(two[2:]) == (0.0, 0)
    single = points("full", [100, 200], [10.0], seeds=1) + points("b", [90, 300], [10.0], seeds=1)
    rows = at_equal_parameters(single, "full")
    assert rows and all(row["low"] is None for row in rows)
    assert "[" not in parameters_table(rows, "full").partition("\n")[2]
