# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Time lost to failures, against a simulation that draws each of them."""

import math
import random

import pytest

from torchtitan_lr.formulas import faults

MEAN, PAUSE, RESTART = 1000.0, 20.0, 60.0


def simulated(interval, segments=20_000):
    """Time over training time: each segment is tried until no failure meets it."""
    draw = random.Random(7)
    elapsed = 0.0
    for _ in range(segments):
        ahead = interval + PAUSE
        while (failure := draw.expovariate(1 / MEAN)) < ahead:
            elapsed += failure
            # A restart may fail too.
            while (again := draw.expovariate(1 / MEAN)) < RESTART:
                elapsed += again
            elapsed += RESTART
        elapsed += ahead
    return elapsed / (segments * interval)


@pytest.mark.parametrize("interval", [50.0, 200.0, 900.0])
def test_expected_time_is_that_of_drawn_failures(interval):
    expected = simulated(interval)
    found = faults.run_time_factor(interval, PAUSE, RESTART, MEAN)
    assert found == pytest.approx(expected, rel=0.03)
    # The control: the pause left out.
    if interval < 100:
        without = faults.run_time_factor(interval, 0, RESTART, MEAN)
        assert without != pytest.approx(expected, rel=0.03)


def test_the_interval_is_the_best_one():
    def time(interval):
        return faults.run_time_factor(interval, PAUSE, RESTART, MEAN)

    best = min((10.0 * i for i in range(1, 200)), key=time)
    found = faults.daly_interval(PAUSE, MEAN)
    assert found == pytest.approx(best, abs=10)
    # Young's is the first order of it, and worse.
    young = faults.young_interval(PAUSE, MEAN)
    assert young == math.sqrt(2 * PAUSE * MEAN)
    assert time(found) <= time(young) < time(3 * young)


def test_limits():
    assert faults.mean_time_to_failure(1024, 1000, 10_800) == pytest.approx(10_546.875)
    # Rare failures: what is lost are the pauses.
    assert faults.lost_share(100, 1, 60, 1e12) == pytest.approx(1 / 101, rel=1e-3)
    assert faults.daly_interval(30, 10) == 10
