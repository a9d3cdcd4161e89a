# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tokens of a corpus for an evaluation: every one is a label exactly once.

Validation during training cuts windows of ``seq_len + 1`` tokens that share nothing: the first
token of each is no label, and an unfilled last window is dropped. Here a window begins with the
last token of the one before, and the last window is filled up with ignored labels. The loss then
covers whole documents, so that bits per byte of their text are exact.

A pair is a window of its own, as in training; its bytes are those of the answers that are labels.

On several data-parallel ranks window ``i`` belongs to rank ``i mod D``. Every rank has the same
number of rows in every batch: where windows are missing, rows of ignored labels take their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from torchtitan_lr.data.blocks import Corpus
from torchtitan_lr.data.documents import DocumentBorders, separated
from torchtitan_lr.data.pair_corpora import PairCorpus
from torchtitan_lr.data.pairs import pair_windows, unmask_
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import BaseTokenizer


class EvaluationSet:
    """Batches of a corpus, read from its start in one pass; nothing but a batch is in memory.

    Args:
        corpus: The documents. Each is encoded with BOS and EOS, as in training; the first token
            of all is no label. Or pairs, whose answers alone are labels.
        tokenizer: Encodes the documents.
        seq_len: Tokens per window, the longest context of a label.
        batch_size: Windows per batch and rank; the last batch may have fewer.
        documents: Number of documents to read at most; None for all.
        dp_world_size: Data-parallel ranks that share the windows, ``D``.
        dp_rank: This rank.
        borders: Keeps the documents of a row apart; None to let them see each other.

    Attributes:
        num_documents: Documents read so far, the same on every rank.
        num_bytes: Bytes of their text in UTF-8.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        seq_len: int,
        batch_size: int,
        documents: int | None = None,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        borders: DocumentBorders | None = None,
    ) -> None:
        self._borders = borders
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._documents = documents
        self._ranks, self._rank = dp_world_size, dp_rank
        self.num_documents = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64, on the CPU."""
        self.num_documents = self.num_bytes = 0
        windows = self._windows()
        while rows := list(islice(windows, self._batch_size * self._ranks)):
            height = -(-len(rows) // self._ranks)
            inputs = torch.zeros(height, self._seq_len, dtype=torch.int64)
            labels = torch.full((height, self._seq_len), IGNORE_INDEX)
            for index, row in enumerate(rows[self._rank :: self._ranks]):
                inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
                labels[index, : len(row) - 1] = torch.tensor(row[1:])
            unmask_(inputs, labels)
            yield separated(self._borders, inputs, labels)

    def _windows(self) -> Iterator[list[int]]:
        if not isinstance(self._corpus, PairCorpus):
            yield from _shared_windows(self._encoded(), self._seq_len)
            return
        records, size = self._corpus.records(), self._seq_len + 1
        for row in pair_windows(records, self._tokenizer, size, self._documents):
            self.num_documents += 1
            answers = [token for token in row[1:].tolist() if token >= 0]
            self.num_bytes += len(self._tokenizer.decode(answers).encode())
            yield row.tolist()

    def _encoded(self) -> Iterator[list[int]]:
        for text in islice(self._corpus, self._documents):
            self.num_documents += 1
            self.num_bytes += len(text.encode("utf-8", errors="replace"))
            yield self._tokenizer.encode(text, add_bos=True, add_eos=True)


def _shared_windows(documents: Iterator[list[int]], size: int) -> Iterator[list[int]]:
    """Yield windows of ``size + 1`` tokens, each beginning with the last token of the one before.

    The last window may be shorter, but has at least two tokens.
    """
    rows: list[list[int]] = []
    buffer: list[int] = []
    for tokens in documents:
        buffer += tokens
        full = max(0, len(buffer) - 1) // size * size
        for start in range(0, full, size):
            rows.append(buffer[start : start + size + 1])
        del buffer[:full]
        yield from rows
        rows.clear()
    if len(buffer) > 1:
        rows.append(buffer)
    yield from rows
