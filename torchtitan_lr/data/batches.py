# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank's micro-batches in order, each with the position behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_lr.data.blocks import BlockCorpus, Corpus
from torchtitan_lr.data.documents import DocumentBorders, separated
from torchtitan_lr.data.mixture import MixedStripe, Mixture
from torchtitan_lr.data.order import Order
from torchtitan_lr.data.pairs import PairStripe, ShuffledPairStripe, unmask_
from torchtitan_lr.data.shuffle import ShuffledStripe
from torchtitan_lr.data.stripes import Stripe, fill
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan.base import BaseTokenizer

MicroBatch = tuple[dict[str, torch.Tensor], torch.Tensor]

READ_TOKENS = 1 << 16
"""Tokens that all stripes of a rank together hold after a fill, if one micro-batch is not more."""


@dataclass(frozen=True)
class Rows:
    """The rows of the global batch that a rank reads.

    Attributes:
        local: ``b``, rows per micro-batch.
        total: ``B``, rows per step over all ranks.
        ranks: ``D``, number of data-parallel ranks.
        rank: ``r``, this rank.
        stripes: Number of stripes of all rows; each stripe has ``B / stripes`` consecutive rows.

    Raises:
        ConfigError: The batch sizes do not divide, or the rows of a stripe are on several ranks.
    """

    local: int
    total: int
    ranks: int
    rank: int
    stripes: int

    @staticmethod
    def of(corpus: Corpus, local: int, total: int, ranks: int, rank: int) -> Rows:
        """Split a batch; see the attributes.

        Args:
            corpus: The corpus, which determines the number of stripes.
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
        rows = Rows(local, total, ranks, rank, corpus.num_stripes(total))
        shared = rows.per_stripe
        if local % shared:
            below, above = local // shared * shared, -(-local // shared) * shared
            nearest = f"{below} or {above}" if below else str(above)
            raise ConfigError(
                "training.local_batch_size",
                local,
                f"{nearest}: {corpus.name} splits into {rows.stripes} streams, so {shared} rows of "
                f"the global batch of {total} share a stream and must be on one rank",
            )
        return rows

    @property
    def per_stripe(self) -> int:
        """Rows that share a stripe; they are in one micro-batch."""
        return self.total // self.stripes

    @property
    def stride(self) -> int:
        """Rows of one micro-batch over all ranks."""
        return self.ranks * self.local

    @property
    def microbatches(self) -> int:
        """Micro-batches per step."""
        return self.total // self.stride

    def stripes_at(self, sample_index: int) -> list[int]:
        """Return the stripes of this rank's micro-batch that begins at a position of the run."""
        start = sample_index % self.total + self.rank * self.local
        return [row // self.per_stripe for row in range(start, start + self.local, self.per_stripe)]


@dataclass
class Prepared:
    """A micro-batch, or why there is none, and the position behind it.

    Attributes:
        batch: ``({"input": (b, s)}, labels (b, s))``, with ``"documents"`` (b, s) where they are
            kept apart; None at the end and with an error.
        sample_index: Samples consumed by all ranks together, this micro-batch included.
        positions: Positions of the stripes that it read.
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
        order: The shuffled order; None for the fixed one.
        borders: Keeps the documents of a row apart; None to let them see each other.

    Attributes:
        order: The present order: that of the last :meth:`seek`, if there was one.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        rows: Rows,
        seq_len: int,
        infinite: bool,
        pin_memory: bool,
        order: Order | None = None,
        borders: DocumentBorders | None = None,
    ) -> None:
        self._borders = borders
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._infinite = infinite
        self._rows = rows
        self.order = order
        self._device = torch.cuda.current_device() if pin_memory else None
        self._sample_index = 0
        starts = range(0, rows.microbatches * rows.stride, rows.stride)
        self._owned = sorted({stripe for start in starts for stripe in rows.stripes_at(start)})
        self._stripes = self._open(order)
        windows = len(self._owned) * rows.per_stripe
        self._most_visits = max(1, READ_TOKENS // (windows * (seq_len + 1)))
        self._visits = 1

    def _open(self, order: Order | None) -> dict[int, Stripe | MixedStripe]:
        def stripe(corpus: Corpus, index: int) -> Stripe:
            stream = corpus.stream(index, self._rows.stripes, self._infinite, order)
            pairs, reads = getattr(corpus, "pairs", False), (stream, self._tokenizer, self._seq_len)
            if order is None:
                return (PairStripe if pairs else Stripe)(*reads)
            return (ShuffledPairStripe if pairs else ShuffledStripe)(*reads, order, index)

        def mixed(mixture: Mixture, index: int) -> MixedStripe:
            each = self._rows.per_stripe
            rows = range(index * each, (index + 1) * each)
            parts = [stripe(corpus, index) for corpus in mixture.corpora]
            return MixedStripe(mixture, parts, rows, order.seed if order else 0)

        corpus = self._corpus
        if isinstance(corpus, Mixture):
            return {index: mixed(corpus, index) for index in self._owned}
        return {index: stripe(corpus, index) for index in self._owned}

    def positions(self) -> dict[int, dict[str, Any]]:
        """Return the position of every stripe of this rank."""
        return {stripe: reader.state() for stripe, reader in self._stripes.items()}

    def seek(self, sample_index: int, positions: dict[int, Any], changed: bool) -> None:
        """Move to a position, and take over its order: it counts windows of that order.

        Args:
            sample_index: Samples consumed by all ranks together.
            positions: Position of every stripe of this rank.
            changed: Whether the corpus may have changed since.

        Raises:
            ConfigError: As for :meth:`Stripe.load_state`.
        """
        orders = {Order.of(position.get("order")) for position in positions.values()}
        (order,) = orders  # all stripes of a run have the same one
        if order != self.order:
            self.order, self._stripes = order, self._open(order)
        for stripe, reader in self._stripes.items():
            reader.load_state(positions[stripe], changed)
        self._sample_index = sample_index

    def read(self) -> Iterator[Prepared]:
        """Yield micro-batches from the position on, then one item without a batch."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # every thread has its own
        known = set(self._skipped)
        while True:
            windows, error = None, None
            stripes = self._rows.stripes_at(self._sample_index)
            try:
                windows = self._windows(stripes)
            except ConfigError as found:
                error = found
            skipped = self._skipped - known
            known |= skipped
            if windows is None:
                yield Prepared(None, self._sample_index, {}, skipped, error)
                return
            self._sample_index += self._rows.stride
            positions = {stripe: self._stripes[stripe].state() for stripe in stripes}
            yield Prepared(self._batch(windows), self._sample_index, positions, skipped)

    @property
    def _skipped(self) -> set[str]:
        corpus = self._corpus
        return corpus.skipped if isinstance(corpus, BlockCorpus | Mixture) else set()

    def _windows(self, stripes: list[int]) -> npt.NDArray[np.int64] | None:
        """Return the windows of one micro-batch, ``(b, s + 1)``; None at the end of a stripe."""
        visit = self._rows.per_stripe
        if any(
            part.missing(windows)
            for stripe in stripes
            for part, windows in self._stripes[stripe].demands(visit)
        ):
            count = visit * self._visits
            fill([one for stripe in self._stripes.values() for one in stripe.demands(count)])
            # A short run reads little ahead, a long one enough for all cores.
            self._visits = min(2 * self._visits, self._most_visits)
        found = []
        for stripe in stripes:
            windows = self._stripes[stripe].take(visit)
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
        inputs.copy_(tokens[:, :-1])
        labels.copy_(tokens[:, 1:])
        unmask_(inputs, labels)
        batch = separated(self._borders, inputs, labels)
        if pinned and self._borders is not None:
            return {k: v.pin_memory() for k, v in batch[0].items()}, batch[1].pin_memory()
        return batch
