# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The validation set: fixed sequences, each on one rank, with equally many batches on all ranks.

The held-out documents are tokenised once, in order, and packed into windows of ``seq_len + 1``
tokens as in training; a pair is a sequence of its own. Sequence ``i`` belongs to data-parallel rank
``i mod D``. Ranks with fewer sequences are padded with rows whose labels are all ignored. Therefore
no rank waits for another, and the token-weighted mean is exact for any ``D``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_lr.console.progress import progress
from torchtitan_lr.data.blocks import Corpus
from torchtitan_lr.data.checks import check_workers
from torchtitan_lr.data.corpora import validation_source
from torchtitan_lr.data.documents import DocumentBorders, separated
from torchtitan_lr.data.pair_corpora import PairCorpus
from torchtitan_lr.data.pairs import no_room, pair_windows, unmask_
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import BaseTokenizer


class ValidationSet:
    """One rank's share of the validation sequences, in memory.

    Args:
        windows: This rank's sequences, int32 ``(n_r, s + 1)``.
        num_sequences: Sequences of all ranks together.
        batch_size: Rows per batch, ``b``.
        dp_world_size: Data-parallel ranks, ``D``.
        unigram_entropy: See below.
        num_tokens: See below; by default every label counts.
        borders: Keeps the documents of a row apart; None to let them see each other.

    Attributes:
        unigram_entropy: Entropy in nats of the label tokens of all ranks together: the loss of
            the best model without context. A trained model must be below it.
        num_sequences: Sequences of all ranks together.
        num_tokens: Label tokens of all ranks together, without padding and prompts.
    """

    def __init__(
        self,
        windows: torch.Tensor,
        num_sequences: int,
        batch_size: int,
        dp_world_size: int,
        unigram_entropy: float,
        num_tokens: int | None = None,
        borders: DocumentBorders | None = None,
    ) -> None:
        self._borders = borders
        self._windows = windows
        self._batch_size = batch_size
        self._num_batches = math.ceil(math.ceil(num_sequences / dp_world_size) / batch_size)
        self.unigram_entropy = unigram_entropy
        self.num_sequences = num_sequences
        every = num_sequences * (windows.shape[1] - 1)
        self.num_tokens = every if num_tokens is None else num_tokens

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64; padded rows have ignored labels.

        With ``borders`` the inputs have ``"documents"`` (b, s) as well.
        """
        size = self._batch_size
        for start in range(0, self._num_batches * size, size):
            rows = self._windows[start : start + size].long()
            inputs = rows.new_zeros(size, rows.shape[1] - 1)
            labels = torch.full_like(inputs, IGNORE_INDEX)
            inputs[: len(rows)] = rows[:, :-1]
            labels[: len(rows)] = rows[:, 1:]
            unmask_(inputs, labels)
            yield separated(self._borders, inputs, labels)


def build_validation_set(
    job_config: Any, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer
) -> ValidationSet:
    """Tokenise the validation corpus and keep this rank's share.

    Every rank tokenises the whole corpus, so that it computes the entropy without communication.

    Args:
        job_config: The run's ``JobConfig``; section ``validation`` is read, and ``training`` for
            its held-out part. ``steps = -1`` uses every full window of the corpus, ``steps > 0``
            at most that many batches per rank.
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank.
        tokenizer: The run's tokenizer.

    Raises:
        ConfigError: As for :func:`build_corpus`, or the corpus is shorter than one window.
    """
    section = job_config.validation
    check_workers(section.dataloader, "validation")
    corpus = validation_source(job_config).open()
    limit = None
    if section.steps > 0:
        limit = section.steps * section.local_batch_size * dp_world_size
    kept: list[torch.Tensor] = []
    counts = torch.zeros(0, dtype=torch.int64)
    borders = DocumentBorders.of(job_config, tokenizer)
    num_sequences = 0
    windows = _windows(corpus, tokenizer, section.seq_len, limit)
    first = dp_rank == 0 and int(os.environ.get("RANK", "0")) == 0
    for window in progress(windows, "tokenizing validation", limit, "sequences", first):
        labels = window[1:]
        if borders is not None:
            labels = labels[~borders.crossing(window[:-1], labels)]
        counts = _add_counts(counts, labels)
        if num_sequences % dp_world_size == dp_rank:
            kept.append(window)
        num_sequences += 1
    if num_sequences == 0:
        if isinstance(corpus, PairCorpus):
            raise no_room(section.seq_len, "validation", f"all pairs of {corpus.name!r}")
        raise ConfigError(
            "validation.seq_len",
            section.seq_len,
            f"fewer tokens than the whole validation corpus {corpus.name!r} has",
        )
    empty = torch.empty(0, section.seq_len + 1, dtype=torch.int32)
    return ValidationSet(
        torch.stack(kept) if kept else empty,
        num_sequences,
        section.local_batch_size,
        dp_world_size,
        entropy(counts),
        int(counts.sum()),
        borders,
    )


def entropy(counts: torch.Tensor) -> float:
    """Return the entropy of a distribution given by counts.

    Args:
        counts: Count of each outcome, ``(V,)``, not all zero.

    Returns:
        ``-sum p log p`` in nats.
    """
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log()).sum())


def _windows(
    corpus: Corpus, tokenizer: BaseTokenizer, seq_len: int, limit: int | None
) -> Iterator[torch.Tensor]:
    """Yield the first ``limit`` full windows, int32 ``(seq_len + 1,)``."""
    size, found = seq_len + 1, 0
    if isinstance(corpus, PairCorpus):
        for row in pair_windows(corpus.records(), tokenizer, size, limit):
            yield torch.from_numpy(row)
        return
    buffer: list[int] = []
    for text in corpus:
        buffer += tokenizer.encode(text, add_bos=True, add_eos=True)
        full = len(buffer) // size * size
        for start in range(0, full, size):
            if found == limit:
                return
            yield torch.tensor(buffer[start : start + size], dtype=torch.int32)
            found += 1
        del buffer[:full]


def _add_counts(counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    labels = tokens[tokens >= 0]  # prompts and padding are complements
    more = torch.bincount(labels, minlength=len(counts))
    more[: len(counts)] += counts
    return more
