# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The order of rows: permutations, epochs, and shares that are exact at every point."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lr.data.dataloader import MOST_SLOTS, Shares, shuffled

SEEDS = st.integers(0, 2**63)


@given(size=st.integers(1, 3000), seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_each_epoch_has_each_window_once(size, seed):
    rows = shuffled(np.arange(3 * size), size, seed).reshape(3, size)
    assert np.array_equal(np.sort(rows), [np.arange(size)] * 3)
    # Two of 20! orders are not equal by chance.
    assert size < 20 or not (rows[0] == rows[1:]).all(1).any()


@given(size=st.integers(1, 10**12), seed=SEEDS, first=st.integers(0, 10**13))
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_the_rows_around_it(size, seed, first):
    rows = np.arange(first, first + 40)
    together = shuffled(rows, size, seed, 1)
    alone = [int(shuffled(rows[i : i + 1], size, seed, 1)[0]) for i in range(40)]
    assert together.tolist() == alone
    assert together.min() >= 0 and together.max() < size


def test_the_order_looks_random():
    size = 1 << 15
    orders = [shuffled(np.arange(size), size, seed) for seed in (0, 1)]
    places = np.arange(size)
    # Independent uniform places: a correlation is below 4 / sqrt(32768) = 0.022 in all but 1e-4.
    pairs = [(orders[0], orders[1]), (orders[0], places), (orders[0][:-1], orders[0][1:])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.022 for a, b in pairs)
    # Fixed points of a random permutation: Poisson with mean 1.
    assert (orders[0] == places).sum() < 8
    # Each quarter of the rows has all quarters of the text alike: 2048 +- 5 * 39.
    table = np.histogram2d(places // (size // 4), orders[0] // (size // 4), bins=4)[0]
    assert abs(table - size / 16).max() < 5 * 39


WEIGHTS = st.lists(st.integers(1, 60) | st.sampled_from([0.1, 0.25, 1.75]), min_size=1, max_size=6)


@given(WEIGHTS)
@settings(max_examples=25, deadline=None)
def test_shares_are_exact_at_every_point(weights):
    shares = Shares(weights)
    rows = np.arange(min(2 * len(shares.slots) + 5, 1000))
    parts, numbers = shares.choose(rows)
    exact = [Fraction(str(weight)) for weight in weights]
    seen = [0] * len(weights)
    for row, part, number in zip(rows.tolist(), parts.tolist(), numbers.tolist(), strict=True):
        assert number == seen[part]  # each part's rows in their order, none twice
        seen[part] += 1
        assert shares.seen(row + 1) == seen
        for count, weight in zip(seen, exact, strict=True):
            assert abs(count - (row + 1) * weight / sum(exact)) < 1


def test_shares_that_need_a_long_period_are_rounded():
    weights = [0.123457, 1 / 3, 2e-7, 2]
    shares = Shares(weights)
    assert len(shares.slots) == MOST_SLOTS and shares.counts.min() == 1
    wanted = np.array(weights) / sum(weights)
    assert abs(shares.counts / MOST_SLOTS - wanted).max() <= 2 / MOST_SLOTS
    parts, _ = shares.choose(np.arange(10**15, 10**15 + MOST_SLOTS))
    assert np.bincount(parts).tolist() == shares.counts.tolist()
