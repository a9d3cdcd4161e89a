# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fixed sequences for validation, and the whole text of documents for an evaluation.

Sequence ``i`` belongs to data-parallel rank ``i mod D``. All ranks have the same number of rows in
every batch: where sequences are missing, rows of ignored labels take their place. So no rank waits
for another, and the token-weighted mean is exact for any ``D``.

Validation reads the rows of the held-out shards (:mod:`torchtitan_lr.data.rows`), those of a
mixture's parts in turn. These share nothing: the first token of each is no label, and an unfilled
last window is dropped. In an evaluation a window begins with the last token of the one before, and
the last one is filled up. Every token is a label once, so bits per byte of the text are exact. A
pair is a window of its own; its bytes are those of the answers that are labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.rows import Batch, Rows, as_batch, labelled, read_parts
from torchtitan_lr.data.sources import Reader, Source
from torchtitan_lr.titan import IGNORE_INDEX

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import BaseTokenizer

Columns = npt.NDArray[np.int64]
"""Tokens, whether each counts in the loss, and whether it begins a document: (3, n)."""


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


@dataclass(frozen=True)
class Document:
    """An encoded document or pair.

    Attributes:
        tokens: Its ids, with what stands around a document in training (n,).
        num_bytes: Bytes of its text in UTF-8; of a pair they are counted from its answers.
        targets: Of a pair: which tokens are an answer's (n,).
    """

    tokens: npt.NDArray[np.integer[Any]]
    num_bytes: int = 0
    targets: npt.NDArray[np.integer[Any]] | None = None

    @property
    def columns(self) -> Columns:
        """The document as columns; as part of a text all of its tokens count."""
        targets = np.ones_like(self.tokens) if self.targets is None else self.targets
        begins = np.arange(len(self.tokens)) == 0
        return np.stack([self.tokens, targets, begins]).astype(np.int64)


class EvaluationSet:
    """Batches of a text, read from its start in one pass; nothing but a batch is in memory.

    Args:
        documents: Reads the text from its start; called in each pass.
        decode: Token ids to text, for the bytes of pairs.
        seq_len: Tokens per window, the longest context of a label.
        batch_size: Windows per batch and rank; the last batch may have fewer.
        most: Number of documents to read at most; None for all.
        dp_world_size: Data-parallel ranks that share the windows, ``D``.
        dp_rank: This rank.
        mask_documents: Whether documents are kept apart.

    Attributes:
        num_documents: Documents read so far, the same on every rank.
        num_bytes: Bytes of their text in UTF-8.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[Document]],
        decode: Callable[[list[int]], str],
        seq_len: int,
        batch_size: int,
        most: int | None = None,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        mask_documents: bool = False,
    ) -> None:
        self._documents, self._decode, self._most = documents, decode, most
        self._size, self._batch_size = seq_len + 1, batch_size
        self._ranks, self._rank = dp_world_size, dp_rank
        self._apart = mask_documents
        self.num_documents = self.num_bytes = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64, on the CPU."""
        self.num_documents = self.num_bytes = 0
        windows = self._windows()
        while found := list(islice(windows, self._batch_size * self._ranks)):
            rows = np.zeros((3, -(-len(found) // self._ranks), self._size), dtype=np.int64)
            for index, window in enumerate(found[self._rank :: self._ranks]):
                rows[:, index, : window.shape[1]] = window
            begins = rows[2] > 0 if self._apart else None
            yield as_batch(labelled(rows[0], rows[1] > 0, begins))

    def _windows(self) -> Iterator[Columns]:
        """Yield windows of up to ``seq_len + 1`` tokens; the last of a text has at least two."""
        rest = np.empty((3, 0), dtype=np.int64)
        for document in islice(self._documents(), self._most):
            self.num_documents += 1
            self.num_bytes += document.num_bytes
            columns = document.columns
            if document.targets is not None:
                window = columns[:, : self._size]
                answers = window[0, 1:][window[1, 1:] > 0].tolist()
                self.num_bytes += len(self._decode(answers).encode())
                yield window
                continue
            rest = np.concatenate([rest, columns], axis=1)
            step = self._size - 1
            full = max(0, rest.shape[1] - 1) // step * step
            for start in range(0, full, step):
                yield rest[:, start : start + self._size]
            rest = rest[:, full:]
        if rest.shape[1] > 1:
            yield rest


def encoded(
    source: Source, tokenizer: BaseTokenizer, held_out: bool | None = True
) -> Iterator[Document]:
    """Read and encode a source, document by document.

    Args:
        source: What to read.
        tokenizer: Encodes the documents.
        held_out: The part; None for both.

    Raises:
        ConfigError: There is no such source.
        DataError: A file or a record is unreadable.
    """
    reader = Reader(source)
    pairs = PairEncoder(tokenizer) if reader.pairs else None
    for text in reader.texts(held_out):
        if pairs is None:
            ids = np.array(tokenizer.encode(text, add_bos=True, add_eos=True), dtype=np.int64)
            yield Document(ids, len(text.encode("utf-8", errors="replace")))
        else:
            pair = pairs.encode(text)
            yield Document(np.where(pair < 0, ~pair, pair), 0, (pair >= 0).astype(np.int64))


def prepared(corpora: Sequence[Corpus], tokenizer: BaseTokenizer) -> Iterator[Document]:
    """Read the held-out documents of prepared corpora; their bytes are those of decoded text."""
    for corpus in corpora:
        for info in corpus.held_out:
            shard, start = corpus.shard(info), 0
            for end in shard.ends.tolist():
                ids = shard.read(start, end)
                if corpus.kind == "pairs":
                    yield Document(ids, 0, corpus.shard(info, loss=True).read(start, end))
                else:
                    yield Document(ids, len(tokenizer.decode(ids.tolist()).encode()))
                start = end


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
