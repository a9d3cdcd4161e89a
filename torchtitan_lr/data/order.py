# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The seeded order of training rows: permutations without a table, and exact shares of a mixture.

Row k of a run is a pure function of (corpus, seed, k). Each epoch permutes the windows by a Feistel
network (Luby and Rackoff, 1988) over the smallest power of two that holds them. A result that is no
window is encrypted again until it is one: cycle walking (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002, section 4). Memory and start-up are the same for a gigabyte and a terabyte.
The round function is integer arithmetic alone, so the order is the same on every machine and after
an update of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 6
"""Four rounds suffice for a pseudo-random permutation; more help where the halves are small."""

MOST_SLOTS = 1 << 16
"""Longest period of a mixture; shares that need a longer one are rounded to 1/65,536."""

_STEP, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def shuffled(rows: Indices, size: int, *key: int) -> Indices:
    """Return the windows that some rows of an endless order read.

    Args:
        rows: Numbers of rows from 0 (n,).
        size: Number of windows. Every ``size`` rows are one epoch, which has each window once.
        *key: Integers, such as the seed; every change of one gives an unrelated order.

    Returns:
        Windows (n,), from 0 to ``size - 1``.
    """
    epochs, places = np.divmod(rows, size)
    windows, bits = np.empty_like(rows), max(2, (size - 1).bit_length())
    for epoch in np.unique(epochs).tolist():  # a batch is in one epoch, or across one border
        inside, keys = epochs == epoch, _round_keys(*key, epoch)
        images = _feistel(places[inside].astype(np.uint64), bits, keys)
        # The domain is less than twice as large as the windows: on average two walks are enough.
        while (outside := images >= size).any():
            images[outside] = _feistel(images[outside], bits, keys)
        windows[inside] = images
    return windows


def _feistel(values: Words, bits: int, keys: Words) -> Words:
    """Encrypt numbers of some bits; the halves' widths differ by one if the number is odd."""
    low, high = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for key in keys:
        # The half that is replaced has the width of the other half of the next round.
        left, right = right, left ^ _mixed(right + key) >> np.uint64(64 - high)
        low, high = high, low
    return left << np.uint64(low) | right


@lru_cache(maxsize=64)  # one for each part and epoch
def _round_keys(*key: int) -> Words:
    # Arrays, also of one number: numpy warns where a scalar overflows.
    seed = np.array([_STEP], dtype=np.uint64)
    for part in key:
        seed = _mixed(seed ^ _mixed(np.array([part + _STEP & _WORD], dtype=np.uint64)))
    return _mixed(np.uint64(_STEP) * np.arange(1, ROUNDS + 1, dtype=np.uint64) + seed)


def _mixed(values: Words) -> Words:
    """Return the finalizer of SplitMix64 (Steele et al., 2014) of each number."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Shares:
    """Which part of a mixture each row is of, and which row of that part.

    After any n rows, part i has had more than ``n w_i - 1`` and fewer than ``n w_i + 1`` of them:
    the schedule is one period of a proportionate-fair one, by earliest pseudo-deadline (Baruah et
    al., "Proportionate progress", 1996). Part i's row number j is due in the slots from
    ``j / w_i`` to ``(j + 1) / w_i``.

    Args:
        weights: Positive weights, over whose sum the shares are.

    Attributes:
        slots: Which part each row of a period is of.
        counts: Rows of each part in a period.
        _before: Rows of each part before each slot, and in a whole period (period + 1, parts).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # A third is a third again, whatever its digits as a float.
        least = Fraction(1, MOST_SLOTS)
        exact = [max(Fraction(weight).limit_denominator(MOST_SLOTS), least) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        denominators = [share.denominator for share in shares]
        period = min(int(np.lcm.reduce(denominators, dtype=object)), MOST_SLOTS)
        counts = [max(1, round(share * period)) for share in shares]
        counts[int(np.argmax(counts))] += period - sum(counts)  # 0 unless the period was limited
        slots, before = [], [[0] * len(counts)]
        for slot in range(period):
            given = before[-1]
            released = [i for i, n in enumerate(counts) if given[i] * period < (slot + 1) * n]
            slots.append(min(released, key=lambda i: -((given[i] + 1) * -period // counts[i])))
            before.append([n + (i == slots[-1]) for i, n in enumerate(given)])
        self.counts, self.slots = np.array(counts), np.array(slots)
        self._before = np.array(before)

    def choose(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the part (n,) of some rows (n,), and their numbers (n,) in it."""
        periods, slots = np.divmod(rows, len(self.slots))
        parts = self.slots[slots]
        return parts, periods * self.counts[parts] + self._before[slots, parts]

    def seen(self, rows: int) -> list[int]:
        """Return how many of the first rows each part has had."""
        periods, slot = divmod(rows, len(self.slots))
        found: list[int] = (periods * self.counts + self._before[slot]).tolist()
        return found
