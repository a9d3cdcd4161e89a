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

ROUNDS = 6
"""Four rounds suffice for a pseudo-random permutation; more help where the halves are small."""

MOST_SLOTS = 1 << 16
"""Longest period of a mixture; shares that need a longer one are rounded to 1/65,536."""

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


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
    windows = np.empty_like(rows)
    for epoch in np.unique(epochs).tolist():  # a batch is in one epoch, or across one border
        inside = epochs == epoch
        windows[inside] = permuted(places[inside], size, *key, epoch)
    return windows


def permuted(places: Indices, size: int, *key: int) -> Indices:
    """Apply a permutation of ``0 .. size - 1``, chosen by a key, to some of these places (n,)."""
    bits, keys = max(2, (size - 1).bit_length()), _round_keys(key)
    images = _feistel(places.astype(np.uint64), bits, keys)
    # The domain is less than twice as large as the windows, so on average two walks are enough.
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], bits, keys)
    return images.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], bits: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    """Encrypt numbers of some bits; the halves' widths differ by one if the number is odd."""
    low, high = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for key in keys:
        # The half that is replaced has the width of the other half of the next round.
        left, right = right, left ^ _mixed_array(right + np.uint64(key)) >> np.uint64(64 - high)
        low, high = high, low
    return left << np.uint64(low) | right


@lru_cache(maxsize=64)  # one for each part and epoch
def _round_keys(key: tuple[int, ...]) -> list[int]:
    seed = _STEP
    for part in key:
        seed = _mixed(seed ^ _mixed(part + _STEP & _WORD))
    return [_mixed(_STEP * (index + 1) + seed & _WORD) for index in range(ROUNDS)]


def _mixed(value: int) -> int:
    return int(_mixed_array(np.array([value], dtype=np.uint64))[0])


def _mixed_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
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
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # A third is a third again, whatever its digits as a float.
        least = Fraction(1, MOST_SLOTS)
        exact = [max(Fraction(weight).limit_denominator(MOST_SLOTS), least) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        period = int(np.lcm.reduce([share.denominator for share in shares], dtype=object))
        if period > MOST_SLOTS:
            period = MOST_SLOTS
            rounded = [max(1, round(share * period)) for share in shares]
            rounded[int(np.argmax(rounded))] += period - sum(rounded)
            shares = [Fraction(count, period) for count in rounded]
        self.counts = np.array([int(share * period) for share in shares], dtype=np.int64)
        self.slots = _schedule(self.counts.tolist())
        parts = np.arange(len(weights))
        # Rows of each part before each slot, and in the whole period: (period + 1, parts).
        self._before = np.zeros((period + 1, len(weights)), dtype=np.int64)
        np.cumsum(self.slots[:, None] == parts, axis=0, out=self._before[1:])

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


def _schedule(counts: list[int]) -> Indices:
    """Return the part of each slot of a period, by earliest pseudo-deadline."""
    period = sum(counts)
    given = [0] * len(counts)
    slots = np.empty(period, dtype=np.int64)
    for slot in range(period):
        released = [i for i, n in enumerate(counts) if given[i] * period < (slot + 1) * n]
        part = min(released, key=lambda i: -((given[i] + 1) * -period // counts[i]))
        slots[slot] = part
        given[part] += 1
    return slots
