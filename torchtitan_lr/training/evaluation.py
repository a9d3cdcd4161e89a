# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The loss of a model on a text, in one process: every token is a label once.

A window begins with the last token of the one before, and the last one is filled up, so bits per
byte of the text are exact. A pair is a window of its own; its bytes are those of the answers that
are labels.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_lr.console.terminal import progress
from torchtitan_lr.data.corpus import Batch, labelled, moved
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.sources import Reader, Source
from torchtitan_lr.data.tokenizer import Tokenizer, Tokens
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan import IGNORE_INDEX

Document = tuple[Tokens, int, Tokens | None]
"""A document or a pair: ids (n,), with those that surround it in training; bytes of its text in
UTF-8, 0 for a pair, whose answers are counted; 1 for the tokens of a pair's answers (n,)."""


class EvaluationSet:
    """Batches of a text, read from its start in one pass; nothing but a batch is in memory."""

    num_documents: int  # read so far
    num_bytes: int  # of their text in UTF-8

    def __init__(
        self,
        documents: Callable[[], Iterator[Document]],  # reads the text from its start, in each pass
        decode: Callable[[list[int]], str],  # for the bytes of pairs
        seq_len: int,  # tokens per window, the longest context of a label
        batch_size: int,  # windows per batch; the last batch may have fewer
        mask_documents: bool = False,  # whether documents are kept apart
    ) -> None:
        self._documents, self._decode = documents, decode
        self._seq_len, self._batch_size, self._apart = seq_len, batch_size, mask_documents

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches of up to ``batch_size`` windows."""
        self.num_documents = self.num_bytes = 0
        windows = self._windows()
        while found := list(islice(windows, self._batch_size)):
            rows = np.zeros((3, len(found), self._seq_len + 1), dtype=np.int64)
            for index, window in enumerate(found):
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
    """Read and encode one part of a source, document by document."""
    reader = Reader(source)
    pairs = PairEncoder(tokenizer) if reader.pairs else None
    for text in reader.texts(held_out):
        if pairs is None:
            ids = np.array(tokenizer.encode(text, add_bos=True, add_eos=True), dtype=np.int64)
            yield ids, len(text.encode("utf-8", errors="replace")), None
        else:
            pair = pairs.encode(text)
            yield np.maximum(pair, ~pair), 0, (pair >= 0).astype(np.int64)


@torch.inference_mode()
def total_loss(model: LlamaModel, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the loss summed over all valid tokens, in nats, and their number."""
    device, num_tokens = model.freqs_cis.device, 0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    total = len(batches) if isinstance(batches, Sized) else None
    for batch in progress(batches, "evaluation", total):
        tokens, labels, arguments = moved(batch, device)
        loss_sum += model(tokens, targets=labels, **arguments)
        num_tokens += int((labels != IGNORE_INDEX).sum())
    return float(loss_sum), num_tokens
