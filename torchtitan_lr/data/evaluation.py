# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tokens of a corpus for an evaluation: every one is a label exactly once.

Validation during training cuts windows of ``seq_len + 1`` tokens that share nothing: the first
token of each is no label, and an unfilled last window is dropped. Here a window begins with the
last token of the one before, and the last window is filled up with ignored labels. The loss then
covers whole documents, so that bits per byte of their text are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_lr.data.corpora import Corpus
from torchtitan_lr.data.documents import DocumentBorders, separated


class EvaluationSet:
    """Batches of a corpus, read from its start in one pass; nothing but a batch is in memory.

    Args:
        corpus: The documents. Each is encoded with BOS and EOS, as in training; the first token
            of all is no label.
        tokenizer: Encodes the documents.
        seq_len: Tokens per window, the longest context of a label.
        batch_size: Windows per batch; the last batch may have fewer.
        documents: Number of documents to read at most; None for all.
        borders: Keeps the documents of a row apart; None to let them see each other.

    Attributes:
        num_documents: Documents read so far.
        num_bytes: Bytes of their text in UTF-8.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        seq_len: int,
        batch_size: int,
        documents: int | None = None,
        borders: DocumentBorders | None = None,
    ) -> None:
        self._borders = borders
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._documents = documents
        self.num_documents = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64, on the CPU."""
        self.num_documents = self.num_bytes = 0
        windows = _shared_windows(self._encoded(), self._seq_len)
        while rows := list(islice(windows, self._batch_size)):
            inputs = torch.zeros(len(rows), self._seq_len, dtype=torch.int64)
            labels = torch.full((len(rows), self._seq_len), IGNORE_INDEX)
            for index, row in enumerate(rows):
                inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
                labels[index, : len(row) - 1] = torch.tensor(row[1:])
            yield separated(self._borders, inputs, labels)

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
