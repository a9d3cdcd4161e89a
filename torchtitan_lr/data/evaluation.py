# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tokens of a text for an evaluation: every one is a label exactly once.

Validation during training cuts windows of ``seq_len + 1`` tokens that share nothing: the first
token of each is no label, and an unfilled last window is dropped. Here a window begins with the
last token of the one before, and the last window is filled up with ignored labels. The loss then
covers whole documents, so that bits per byte of their text are exact.

A pair is a window of its own; its bytes are those of the answers that are labels.

On several data-parallel ranks window ``i`` belongs to rank ``i mod D``. Every rank has the same
number of rows in every batch: where windows are missing, rows of ignored labels take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.rows import Batch, as_batch, labelled
from torchtitan_lr.data.sources import Bad, Reader, Source
from torchtitan_lr.errors import DataError

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import BaseTokenizer

Columns = npt.NDArray[np.int64]
"""Tokens, whether each counts in the loss, and whether it begins a document: (3, n)."""


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
    for piece in reader.pieces():
        for found in reader.documents(piece):
            if isinstance(found, Bad):
                raise DataError(source.key, found.where, found.want)
            text = found[0]
            if held_out is not None and found[1] != held_out:
                continue
            if pairs is None:
                ids = np.array(tokenizer.encode(text, add_bos=True, add_eos=True), dtype=np.int64)
                yield Document(ids, len(text.encode("utf-8", errors="replace")))
                continue
            pair = pairs.encode(text)
            yield Document(np.where(pair < 0, ~pair, pair), 0, (pair >= 0).astype(np.int64))


def prepared(corpora: Sequence[Corpus], tokenizer: BaseTokenizer) -> Iterator[Document]:
    """Read the held-out documents of prepared corpora; their bytes are those of decoded text."""
    for corpus in corpora:
        for info in corpus.held_out:
            shard, start = corpus.shard(info), 0
            for end in shard.ends.tolist():
                ids, here = np.asarray(shard.tokens[start:end]), slice(start, end)
                start = end
                if corpus.kind == "pairs":
                    yield Document(ids, 0, np.asarray(corpus.shard(info, loss=True).tokens[here]))
                else:
                    yield Document(ids, len(tokenizer.decode(ids.tolist()).encode()))
