# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank's micro-batches in order, each with the position behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_lr.data.corpora import BlockCorpus, Corpus
from torchtitan_lr.data.lanes import Lane, fill
from torchtitan_lr.errors import ConfigError

MicroBatch = tuple[dict[str, torch.Tensor], torch.Tensor]

READ_TOKENS = 1 << 16
"""Tokens that all lanes of a rank together hold after a fill, if one micro-batch is not more."""


@dataclass(frozen=True)
class Rows:
    """The rows of the global batch that a rank reads.

    Attributes:
        local: ``b``, rows per micro-batch.
        total: ``B``, rows per step over all ranks.
        ranks: ``D``, number of data-parallel ranks.
        rank: ``r``, this rank.
        lanes: Number of lanes of all rows; each lane has ``B / lanes`` consecutive rows.

    Raises:
        ConfigError: The batch sizes do not divide, or the rows of a lane are on several ranks.
    """

    local: int
    total: int
    ranks: int
    rank: int
    lanes: int

    @staticmethod
    def of(corpus: Corpus, local: int, total: int, ranks: int, rank: int) -> Rows:
        """Split a batch; see the attributes.

        Args:
            corpus: The corpus, which determines the number of lanes.
            local: Rows per micro-batch.
            total: Rows per step over all ranks.
            ranks: Number of data-parallel ranks.
            rank: This rank.
        """
        if total <= 0 or total % (local * ranks):
            raise ConfigError(
                "training.global_batch_size",
                total,
                f"a multiple of {local * ranks} (local_batch_size {local} * data-parallel size "
                f"{ranks})",
            )
        rows = Rows(local, total, ranks, rank, corpus.num_lanes(total))
        shared = rows.per_lane
        if local % shared:
            below, above = local // shared * shared, -(-local // shared) * shared
            nearest = f"{below} or {above}" if below else str(above)
            raise ConfigError(
                "training.local_batch_size",
                local,
                f"{nearest}: {corpus.name} splits into {rows.lanes} streams, so {shared} rows of "
                f"the global batch of {total} share a stream and must be on one rank",
            )
        return rows

    @property
    def per_lane(self) -> int:
        """Rows that share a lane; they are in one micro-batch."""
        return self.total // self.lanes

    @property
    def stride(self) -> int:
        """Rows of one micro-batch over all ranks."""
        return self.ranks * self.local

    @property
    def microbatches(self) -> int:
        """Micro-batches per step."""
        return self.total // self.stride

    def lanes_at(self, sample_index: int) -> list[int]:
        """Return the lanes of this rank's micro-batch that begins at a position of the run."""
        start = sample_index % self.total + self.rank * self.local
        return [row // self.per_lane for row in range(start, start + self.local, self.per_lane)]


@dataclass
class Prepared:
    """A micro-batch, or why there is none, and the position behind it.

    Attributes:
        batch: ``({"input": (b, s)}, labels (b, s))``; None at the end and with an error.
        sample_index: Samples consumed by all ranks together, this micro-batch included.
        positions: Positions of the lanes that it read.
        skipped: Locations of the records that were skipped for it.
        error: Why it cannot be read; None at the end.
    """

    batch: MicroBatch | None
    sample_index: int
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    error: ConfigError | None = None


class BatchReader:
    """Reads a rank's micro-batches; may run in a thread of its own.

    Args:
        corpus: The corpus to read.
        tokenizer: Encodes the documents.
        rows: The rank's rows.
        seq_len: Tokens per input row.
        infinite: Whether to start over at the end of the corpus.
        pin_memory: Whether to put the batches in pinned memory.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        rows: Rows,
        seq_len: int,
        infinite: bool,
        pin_memory: bool,
    ) -> None:
        self._corpus = corpus
        self._rows = rows
        self._device = torch.cuda.current_device() if pin_memory else None
        self._sample_index = 0
        owned = sorted(
            {lane for m in range(rows.microbatches) for lane in rows.lanes_at(m * rows.stride)}
        )
        self._lanes = {
            lane: Lane(corpus.stream(lane, rows.lanes, infinite), tokenizer, seq_len)
            for lane in owned
        }
        self._most_visits = max(1, READ_TOKENS // (len(owned) * rows.per_lane * (seq_len + 1)))
        self._visits = 1

    def positions(self) -> dict[int, dict[str, Any]]:
        """Return the position of every lane of this rank."""
        return {lane: reader.state() for lane, reader in self._lanes.items()}

    def seek(self, sample_index: int, positions: dict[int, Any], changed: bool) -> None:
        """Move to a position.

        Args:
            sample_index: Samples consumed by all ranks together.
            positions: Position of every lane of this rank.
            changed: Whether the corpus may have changed since.

        Raises:
            ConfigError: As for :meth:`Lane.load_state`.
        """
        for lane, reader in self._lanes.items():
            reader.load_state(positions[lane], changed)
        self._sample_index = sample_index

    def read(self) -> Iterator[Prepared]:
        """Yield micro-batches from the position on, then one item without a batch."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # every thread has its own
        known = set(self._skipped)
        while True:
            windows, error = None, None
            lanes = self._rows.lanes_at(self._sample_index)
            try:
                windows = self._windows(lanes)
            except ConfigError as found:
                error = found
            skipped = self._skipped - known
            known |= skipped
            if windows is None:
                yield Prepared(None, self._sample_index, {}, skipped, error)
                return
            self._sample_index += self._rows.stride
            positions = {lane: self._lanes[lane].state() for lane in lanes}
            yield Prepared(self._batch(windows), self._sample_index, positions, skipped)

    @property
    def _skipped(self) -> set[str]:
        return self._corpus.skipped if isinstance(self._corpus, BlockCorpus) else set()

    def _windows(self, lanes: list[int]) -> npt.NDArray[np.int64] | None:
        """Return the windows of one micro-batch, ``(b, s + 1)``; None at the end of a lane."""
        visit = self._rows.per_lane
        if any(self._lanes[lane].missing(visit) for lane in lanes):
            fill(list(self._lanes.values()), visit * self._visits)
            # A short run reads little ahead, a long one enough for all cores.
            self._visits = min(2 * self._visits, self._most_visits)
        found = []
        for lane in lanes:
            windows = self._lanes[lane].take(visit)
            if windows is None:
                return None
            found.append(windows)
        return np.concatenate(found)

    def _batch(self, windows: npt.NDArray[np.int64]) -> MicroBatch:
        """Copy windows into an input and labels, each contiguous and pinned if that is wanted."""
        tokens = torch.from_numpy(windows)
        shape = (tokens.shape[0], tokens.shape[1] - 1)
        pinned = self._device is not None
        inputs, labels = (torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in "io")
        return {"input": inputs.copy_(tokens[:, :-1])}, labels.copy_(tokens[:, 1:])
