# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The fit finds the exponents of the law that made the losses, and no others."""

import numpy as np
import pytest

from torchtitan_lr.experiments.results import fit_law, fit_points, student

NOISE = 0.003  # standard deviation of log L, about that of seeds


def test_without_noise_the_law_is_found():
    flops = np.geomspace(1e12, 1e16, 8)
    law = fit_law(np.column_stack([flops, 1.5 + 400 * flops**-0.2]))
    assert law.floor == pytest.approx(1.5, rel=1e-4)
    assert law.alpha == pytest.approx(0.2, rel=1e-3)
    assert law(np.asarray([1e18])) == pytest.approx(1.5 + 400 * 1e18**-0.2, rel=1e-4)


def test_the_true_exponent_is_in_nearly_all_intervals():
    flops = np.repeat(np.geomspace(1e12, 1e16, 8), 3)
    held = 0
    for seed in range(6):
        noise = NOISE * np.random.default_rng(seed).standard_normal(len(flops))
        losses = (1.8 + 3 * (flops / 1e12) ** -0.2) * np.exp(noise)
        _, low, high = fit_points(np.column_stack([flops, losses]), 60).interval("alpha")
        held += low < 0.2 < high
        assert high - low < 0.03  # the control: other exponents are not held
    assert held >= 5


def test_one_wrong_point_hardly_moves_the_fit():
    flops = np.geomspace(1e12, 1e16, 12)
    losses = 1.5 + 3 * (flops / 1e12) ** -0.2
    losses[5] *= 1.2
    assert fit_law(np.column_stack([flops, losses])).alpha == pytest.approx(0.2, abs=0.01)


def test_students_interval_by_hand():
    """Differences 0.1, 0.2, 0.3: standard deviation 0.1, t(0.975, 2) = 4.302653 of a table."""
    mean, low, high = student([3.1 - 3.0, 3.3 - 3.1, 3.4 - 3.1])
    half = 4.302653 * 0.1 / 3**0.5
    assert (mean, low, high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert student([2.0]) == (2.0, None, None)
