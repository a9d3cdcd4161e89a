# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The seeded reading order: permutations that are the same on every rank and machine.

Each pass over the corpus has a permutation of the blocks of its own. It depends on the seed and on
the number of the pass alone, so nothing of it is stored, and every rank finds its blocks without
communication. The keys that are sorted come from integer arithmetic, not from a library's random
numbers: the order of a run is the same after an update of numpy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Order:
    """How a corpus is shuffled; stored with every position.

    Attributes:
        seed: Determines all permutations.
        tokens: Tokens of each row whose windows change places (:mod:`torchtitan_lr.data.shuffle`).
    """

    seed: int
    tokens: int

    def block(self, stripe: int, num_stripes: int, num_blocks: int, k: int) -> int:
        """Return the index of the ``k``-th block that a stripe reads.

        The stripes together read the blocks in turns: block ``k * num_stripes + stripe`` of the
        run. Every ``num_blocks`` of these are one pass, and each pass has its own permutation.

        Args:
            stripe: The stripe, ``0 <= stripe < num_stripes``.
            num_stripes: Number of stripes that share the corpus.
            num_blocks: Number of blocks in the corpus.
            k: Number of blocks that the stripe has read before.
        """
        turn, index = divmod(k * num_stripes + stripe, num_blocks)
        return int(_pass_order(self.seed, turn, num_blocks)[index])

    def windows(self, seq_len: int) -> int:
        """Return how many windows of ``seq_len + 1`` tokens change places, at least one."""
        return max(1, self.tokens // (seq_len + 1))

    def state(self) -> dict[str, int]:
        """Return the order as a JSON value."""
        return asdict(self)

    @staticmethod
    def of(state: dict[str, Any] | None) -> Order | None:
        """Return the order of a stored value; None, the fixed order, for None."""
        return None if state is None else Order(int(state["seed"]), int(state["tokens"]))


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``0 .. count - 1`` that depends on the key alone.

    Args:
        count: Number of places.
        *key: Integers; every change of one gives an unrelated permutation.

    Returns:
        The permutation, ``(count,)``.
    """
    seed = _seed_of(key)
    # Different inputs of `_mix` have different outputs, so no two keys are equal.
    keys = _mix(np.arange(count, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(seed))
    return np.argsort(keys, kind="stable")


def unit_number(*key: int) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the key alone."""
    return float(_seed_of(key) >> 11) / 2.0**53


def _seed_of(key: tuple[int, ...]) -> int:
    seed = _STEP
    for part in key:
        seed = _mix(seed ^ _mix((part + _STEP) & _WORD))
    return seed


@lru_cache(maxsize=4)  # stripes of one rank are in neighbouring passes
def _pass_order(seed: int, turn: int, num_blocks: int) -> npt.NDArray[np.int64]:
    return permutation(num_blocks, seed, turn)


def _mix(value: Any) -> Any:
    """Return the finalizer of SplitMix64 (Steele et al., 2014) of an integer or of uint64."""
    wrap = value.dtype.type if isinstance(value, np.ndarray) else int
    value = _cut((value ^ (value >> wrap(30))) * wrap(0xBF58476D1CE4E5B9))
    value = _cut((value ^ (value >> wrap(27))) * wrap(0x94D049BB133111EB))
    return value ^ (value >> wrap(31))


def _cut(value: Any) -> Any:
    return value & _WORD if isinstance(value, int) else value  # arrays wrap by themselves
