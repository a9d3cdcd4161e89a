# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The validation set: fixed sequences, each on one rank, with equally many batches on all ranks.

The sequences are the rows of the held-out shards in their order (:mod:`torchtitan_lr.data.rows`),
those of a mixture's parts in turn. Sequence ``i`` belongs to data-parallel rank ``i mod D``. Ranks
with fewer sequences are padded with rows whose labels are all ignored. Therefore no rank waits for
another, and the token-weighted mean is exact for any ``D``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from torchtitan_lr.data.rows import Batch, Rows, as_batch, read_parts
from torchtitan_lr.titan import IGNORE_INDEX


class ValidationSet:
    """One rank's share of the validation sequences, read anew in every pass.

    Args:
        parts: The rows of the held-out part of each corpus.
        batch_size: Rows per batch, ``b``.
        dp_world_size: Data-parallel ranks, ``D``.
        dp_rank: This rank.
        steps: Batches per rank at most; -1 for all sequences.

    Attributes:
        num_sequences: Sequences of all ranks together.
    """

    def __init__(
        self,
        parts: Sequence[Rows],
        batch_size: int,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        steps: int = -1,
    ) -> None:
        self._parts, self._batch_size = list(parts), batch_size
        counts = [len(part) for part in parts]
        numbers = np.concatenate([np.arange(count) for count in counts])
        self.num_sequences = len(numbers)
        if steps > 0:
            self.num_sequences = min(len(numbers), steps * batch_size * dp_world_size)
        in_turn = np.argsort(numbers, kind="stable")[: self.num_sequences]
        own = in_turn[dp_rank::dp_world_size]
        self._chosen, self._numbers = np.repeat(np.arange(len(counts)), counts)[own], numbers[own]
        self._num_batches = math.ceil(math.ceil(self.num_sequences / dp_world_size) / batch_size)

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64; padded rows have ignored labels.

        The inputs have ``"documents"`` (b, s) as well where documents are kept apart.
        """
        size = self._batch_size
        for start in range(0, self._num_batches * size, size):
            here = slice(start, start + size)
            rows = self._numbers[here]
            # A rank without a sequence for this batch reads the first one, and ignores it.
            filled = np.concatenate([rows, np.zeros(size - len(rows), dtype=np.int64)])
            chosen = np.concatenate([self._chosen[here], np.zeros_like(filled[len(rows) :])])
            inputs, labels = as_batch(read_parts(self._parts, chosen, filled))
            inputs["input"][len(rows) :], labels[len(rows) :] = 0, IGNORE_INDEX
            yield inputs, labels


def count_labels(batches: ValidationSet) -> torch.Tensor:
    """Return how often each token is a label of a rank's sequences: int64, up to the largest id."""
    counts = torch.zeros(0, dtype=torch.int64)
    for _, labels in batches:
        more = torch.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def entropy(counts: torch.Tensor) -> float:
    """Return the entropy of a distribution given by counts.

    Args:
        counts: Count of each outcome, ``(V,)``, not all zero.

    Returns:
        ``-sum p log p`` in nats.
    """
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log()).sum())
