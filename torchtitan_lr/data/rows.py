# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rows of ``seq_len`` tokens with their labels, read from the shards of a prepared corpus.

The shards of a part are one sequence of tokens. Text is cut into windows of ``seq_len + 1`` tokens
that do not overlap, as in torchtitan's ``HuggingFaceTextDataset``; a last one that is not full is
dropped, and a window may go on in the next document and the next shard. Pairs and chats are packed
instead: a row holds whole ones, as many in their order as have room. One that is longer than a row
is cut; one whose answer then has no room is left out.

A row is therefore a range of tokens, and where each range begins follows from the lengths alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.order import Indices
from torchtitan_lr.data.prepare import Section, ensure_prepared
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DOCUMENTS = "documents"
"""Name of the documents' indices in a batch's inputs, and of the model's argument."""

Batch: TypeAlias = "tuple[dict[str, Tensor], Tensor]"
"""``({"input": (b, s), ...}, labels (b, s))``, int64, on the CPU.

The inputs have ``"documents"`` (b, s) too where documents are kept apart.
"""


class Rows:
    """The rows of one part of a corpus, in the order of its tokens.

    Args:
        corpus: A prepared corpus.
        seq_len: Tokens of an input, ``s``.
        held_out: Whether to read the held-out shards; no others are opened.
        mask_documents: Whether documents are kept apart. Pairs always are.
        name: Its name in logs, and ``weight``, its share in a mixture.

    Attributes:
        pairs: Whether answers alone are labels.
        apart: Whether documents are kept apart.
        cut: Pairs that are longer than a row; ``left_out``: those of them without a label.

    Raises:
        ConfigError: There is no whole row.
        DataError: A shard of pairs is damaged.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        held_out: bool = False,
        mask_documents: bool = False,
        name: str = "",
        weight: float = 1.0,
    ) -> None:
        self.corpus, self.seq_len, self.name, self.weight = corpus, seq_len, name, weight
        self.pairs = corpus.kind == "pairs"
        self.apart = mask_documents or self.pairs
        self._shards = corpus.held_out if held_out else corpus.train
        self._size, self.cut, self.left_out = seq_len + 1, 0, 0
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)], dtype=np.int64)
        tokens = int(self._starts[-1])
        self._count = tokens // self._size
        if self.pairs:
            self._firsts, self._lasts = self._packed()
            self._count = len(self._firsts)
        if not self._count:
            part = f"the {'held-out' if held_out else 'training'} part of {corpus.folder}"
            want = f"at most {max(0, tokens - 1)}: {part} has {tokens} tokens"
            if self.pairs:
                want = f"more tokens: in {part} no answer has room behind its prompt"
            key = "validation.seq_len" if held_out else "training.seq_len"
            raise ConfigError(key, seq_len, want)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    def read(self, rows: Indices) -> Batch:
        """Read some rows (b,); their labels are those of `labelled`.

        Raises:
            DataError: A shard is damaged, or not there.
        """
        first, last = rows * self._size, (rows + 1) * self._size
        if self.pairs:
            first, last = self._firsts[rows], self._lasts[rows]
        tokens = np.zeros((len(rows), self._size), dtype=np.int64)
        targets, begins = np.zeros((2, *tokens.shape), dtype=bool)
        shards = np.searchsorted(self._starts, first, side="right") - 1
        # By shard, so that each is opened once for a batch.
        for row in np.argsort(shards, kind="stable").tolist():
            start, stop, index = int(first[row]), int(last[row]), int(shards[row])
            place = start
            while place < stop:  # a row may be in several shards
                info, offset = self._shards[index], int(self._starts[index])
                end = min(stop, int(self._starts[index + 1]))
                inside, here = (place - offset, end - offset), slice(place - start, end - start)
                shard = self.corpus.shard(info)
                tokens[row, here] = shard.read(*inside)
                if self.pairs:
                    targets[row, here] = self.corpus.shard(info, loss=True).read(*inside)
                if self.apart:
                    begins[row, shard.starts(*inside) + (offset - start)] = True
                place, index = end, index + 1
            if stop - start < self._size:
                begins[row, stop - start] = True  # the padding
        return labelled(tokens, targets if self.pairs else None, begins if self.apart else None)

    def _packed(self) -> tuple[Indices, Indices]:
        """Return where each row of pairs begins and ends, in tokens (n,)."""
        rows = [np.empty((2, 0), dtype=np.int64)]
        for info, offset in zip(self._shards, self._starts, strict=False):
            ends = self.corpus.shard(info).ends
            starts, usable = np.append(0, ends)[:-1], np.ones(len(ends), dtype=bool)
            long = np.flatnonzero(ends - starts > self._size)
            mask = self.corpus.shard(info, loss=True)
            for pair in long.tolist():
                usable[pair] = mask.read(starts[pair] + 1, starts[pair] + self._size).any()
            self.cut, self.left_out = self.cut + len(long), self.left_out + int((~usable).sum())
            # The first pair that has no room in a row that begins with each; a long one is alone.
            fits = np.searchsorted(ends, starts + self._size, side="right")
            nexts = np.maximum(fits, np.arange(len(ends)) + 1).tolist()
            heads, pair = [], 0
            while pair < len(ends):
                heads += [pair] if usable[pair] else []
                pair = nexts[pair]
            lasts = np.minimum(
                ends[[nexts[pair] - 1 for pair in heads]], starts[heads] + self._size
            )
            rows.append(np.stack([starts[heads], lasts]) + offset)
        firsts, lasts = np.concatenate(rows, axis=1)
        return firsts, lasts


def labelled(
    tokens: npt.NDArray[np.int64],
    targets: npt.NDArray[np.bool_] | None = None,
    begins: npt.NDArray[np.bool_] | None = None,
) -> Batch:
    """Make inputs and labels of rows (b, s + 1).

    A label is ignored if it is no target (without ``targets`` all are), or begins a document that
    is kept apart, or the padding behind the last one.
    """
    import torch  # imported late: the launcher checks the lengths of corpora without it

    labels = tokens[:, 1:].copy()
    if targets is not None:
        labels[~targets[:, 1:]] = IGNORE_INDEX
    inputs = {"input": torch.from_numpy(tokens[:, :-1].copy())}
    if begins is not None:
        labels[begins[:, 1:]] = IGNORE_INDEX
        documents = np.cumsum(begins[:, :-1], axis=1, dtype=np.int64)
        inputs[DOCUMENTS] = torch.from_numpy(documents)
    return inputs, torch.from_numpy(labels)


def read_parts(parts: Sequence[Rows], chosen: Indices, numbers: Indices) -> Batch:
    """Read rows: which part each is of (b,), and its number in that part (b,).

    Where one part keeps its documents apart, each row of the others is one document.
    """
    import torch

    if len(parts) == 1:
        return parts[0].read(numbers)
    apart = any(part.apart for part in parts)
    labels = torch.zeros(len(chosen), parts[0].seq_len, dtype=torch.int64)
    inputs = {name: torch.zeros_like(labels) for name in ["input", *[DOCUMENTS] * apart]}
    for index in np.unique(chosen).tolist():
        places = torch.from_numpy(chosen == index)
        own_inputs, labels[places] = parts[index].read(numbers[chosen == index])
        for name, values in own_inputs.items():
            inputs[name][places] = values
    return inputs, labels


class ValidationSet:
    """One rank's share of the held-out rows, those of a mixture's parts in turn.

    Sequence ``i`` is of rank ``i mod D``. All ranks have the same number of rows in every batch:
    where sequences are missing, rows of ignored labels take their place. So no rank waits for
    another, and the token-weighted mean is exact for any ``D``.

    Args:
        parts: The rows of the held-out part of each corpus.
        batch_size: Rows per batch, ``b``.
        dp_world_size: Data-parallel ranks, ``D``.
        dp_rank: This rank.
        steps: Batches per rank at most; -1 for all sequences.
    """

    def __init__(
        self, parts: Sequence[Rows], batch_size: int, dp_world_size: int, dp_rank: int, steps: int
    ) -> None:
        self._parts, self._batch_size = list(parts), batch_size
        counts = [len(part) for part in parts]
        numbers = np.concatenate([np.arange(count) for count in counts])
        rows = np.stack([np.repeat(np.arange(len(counts)), counts), numbers])
        most = steps * batch_size * dp_world_size if steps > 0 else len(numbers)
        in_turn = np.argsort(numbers, kind="stable")[:most]
        self._num_batches = math.ceil(math.ceil(len(in_turn) / dp_world_size) / batch_size)
        # The part of each sequence, and its number there (2, n).
        self._rows = rows[:, in_turn[dp_rank::dp_world_size]]

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches of ``b`` rows; the labels of padded rows are ignored."""
        size = self._batch_size
        for start in range(0, self._num_batches * size, size):
            rows = self._rows[:, start : start + size]
            count = rows.shape[1]
            # A rank without a sequence for this batch reads the first one, and ignores it.
            chosen, numbers = np.pad(rows, ((0, 0), (0, size - count)))
            inputs, labels = read_parts(self._parts, chosen, numbers)
            inputs["input"][count:], labels[count:] = 0, IGNORE_INDEX
            yield inputs, labels


def moved(batch: Batch, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return tokens (b, s), labels (b, s) and the model's other arguments on a device."""
    inputs = {name: value.to(device) for name, value in batch[0].items()}
    return inputs.pop("input"), batch[1].to(device), inputs


def open_rows(
    config: Any, section: Section = "training", world_size: int | None = None
) -> list[Rows]:
    """Open the corpora of a run: what it trains on, or the held-out part that it validates on.

    Arguments are those of `ensure_prepared`, which prepares what is missing.

    Raises:
        ConfigError: As for `ensure_prepared`, or a part has no whole row.
        DataError: As for `ensure_prepared`.
    """
    masked = getattr(config.training, "mask_documents", False)
    seq_len, held_out = getattr(config, section).seq_len, section == "validation"
    opened = []
    for part in ensure_prepared(config, section, world_size):
        corpus = Corpus.open(part.folder)
        if held_out and not corpus.held_out:
            want = "another corpus, or false for validation.enable: "
            raise ConfigError("validation.dataset", part.name, want + "nothing of it is held out")
        opened.append(Rows(corpus, seq_len, held_out, masked, part.name, part.weight))
    return opened
