# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The whole text of documents, for an evaluation: every token is a label once.

A window begins with the last token of the one before, and the last one is filled up, so bits per
byte of the text are exact. A pair is a window of its own; its bytes are those of the answers that
are labels. Windows are dealt to the ranks in turn, and all have the same number of rows in every
batch, where windows are missing rows of ignored labels: no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.corpus import Batch, Corpus, labelled
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.sources import Reader, Source
from torchtitan_lr.data.tokenizer import Tokenizer


class Document(NamedTuple):
    """An encoded document or pair.

    Attributes:
        tokens: The document's ids (n,), with those that surround a document in training.
        num_bytes: Bytes of its text in UTF-8; of a pair they are counted from its answers.
        targets: For a pair, 1 for the tokens of an answer (n,).
    """

    tokens: npt.NDArray[np.integer[Any]]
    num_bytes: int = 0
    targets: npt.NDArray[np.integer[Any]] | None = None


class EvaluationSet:
    """Batches of a text, read from its start in one pass; nothing but a batch is in memory.

    Args:
        documents: Reads the text from its start; called in each pass.
        decode: Token ids to text, for the bytes of pairs.
        seq_len: Tokens per window, the longest context of a label.
        batch_size: Windows per batch and rank; the last batch may have fewer.
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
        dp_world_size: int = 1,
        dp_rank: int = 0,
        mask_documents: bool = False,
    ) -> None:
        self._documents, self._decode = documents, decode
        self._seq_len, self._batch_size = seq_len, batch_size
        self._ranks, self._rank, self._apart = dp_world_size, dp_rank, mask_documents

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches of up to ``batch_size`` windows."""
        self.num_documents = self.num_bytes = 0
        windows = self._windows()
        while found := list(islice(windows, self._batch_size * self._ranks)):
            rows = np.zeros((3, -(-len(found) // self._ranks), self._seq_len + 1), dtype=np.int64)
            for index, window in enumerate(found[self._rank :: self._ranks]):
                rows[:, index, : window.shape[1]] = window
            yield labelled(rows[0], rows[1] > 0, rows[2] > 0 if self._apart else None)

    def _windows(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield windows of 2 to ``seq_len + 1`` tokens (3, n).

        The columns are a token, whether it counts in the loss, and whether it begins a document.
        """
        step = self._seq_len
        rest = np.empty((3, 0), dtype=np.int64)
        for tokens, num_bytes, targets in self._documents():
            self.num_documents += 1
            self.num_bytes += num_bytes
            counts = np.ones_like(tokens) if targets is None else targets
            columns = np.stack([tokens, counts, np.arange(len(tokens)) == 0]).astype(np.int64)
            if targets is not None:
                window = columns[:, : step + 1]
                answers = window[0, 1:][window[1, 1:] > 0].tolist()
                self.num_bytes += len(self._decode(answers).encode())
                yield window
                continue
            rest = np.concatenate([rest, columns], axis=1)
            while rest.shape[1] > step:
                yield rest[:, : step + 1]
                rest = rest[:, step:]
        if rest.shape[1] > 1:
            yield rest


def encoded(source: Source, tokenizer: Tokenizer, held_out: bool = True) -> Iterator[Document]:
    """Read and encode a source, document by document.

    Args:
        source: The corpus to read.
        tokenizer: Encodes the documents.
        held_out: The part.

    Raises:
        ConfigError: The source does not exist.
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
            yield Document(np.maximum(pair, ~pair), 0, (pair >= 0).astype(np.int64))


def prepared(corpora: Sequence[Corpus], tokenizer: Tokenizer) -> Iterator[Document]:
    """Read the held-out documents of prepared corpora; bytes are counted in the decoded text."""
    shards = ((corpus, info) for corpus in corpora for info in corpus.held_out)
    for corpus, info in shards:
        shard, start = corpus.shard(info), 0
        for end in shard.ends.tolist():
            ids = shard.read(start, end)
            if corpus.kind == "pairs":
                yield Document(ids, 0, corpus.shard(info, loss=True).read(start, end))
            else:
                yield Document(ids, len(tokenizer.decode(ids.tolist()).encode()))
            start = end
