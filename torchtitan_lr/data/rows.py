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

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.order import Indices
from torchtitan_lr.data.prepare import (
    Part,
    Section,
    Wanted,
    data_ranks,
    ensure_prepared,
    wanted,
)
from torchtitan_lr.data.sources import Reader
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX, logger

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DOCUMENTS = "documents"
"""Name of the documents' indices in a batch's inputs, and of the model's argument."""

Batch: TypeAlias = "tuple[dict[str, Tensor], Tensor]"
"""``({"input": (b, s), ...}, labels (b, s))``, int64."""

Arrays = tuple[dict[str, npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""The same as arrays."""


class Rows:
    """The rows of one part of a corpus, in the order of its tokens.

    Args:
        corpus: A prepared corpus.
        seq_len: Tokens of an input, ``s``.
        held_out: Whether to read the held-out shards; no others are opened.
        mask_documents: Whether documents are kept apart. Pairs always are.
        key: The TOML section to name in errors.

    Attributes:
        pairs: Whether answers alone are labels.
        cut: Pairs that are longer than a row; ``left_out``: those of them without a label.
        apart: Whether documents are kept apart.

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
        key: str = "training",
    ) -> None:
        self.corpus, self.seq_len = corpus, seq_len
        self.pairs = corpus.kind == "pairs"
        self.apart = mask_documents or self.pairs
        self._shards = corpus.held_out if held_out else corpus.train
        self._size = seq_len + 1
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)], dtype=np.int64)
        tokens = int(self._starts[-1])
        self._count = len(self._packed[0]) if self.pairs else tokens // self._size
        if not self._count:
            part = f"the {'held-out' if held_out else 'training'} part of {corpus.folder}"
            want = f"at most {max(0, tokens - 1)}: {part} has {tokens} tokens"
            if self.pairs:
                want = f"more tokens: in {part} no answer has room behind its prompt"
            raise ConfigError(f"{key}.seq_len", seq_len, want)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    def read(self, rows: Indices) -> Arrays:
        """Read some rows (b,).

        Returns:
            Inputs and labels; the inputs have ``"documents"`` if these are kept apart. A label is
            ignored if it is padding, the first token of a document that is kept apart, or, in
            pairs, no token of an answer.
        """
        first, last = rows * self._size, (rows + 1) * self._size
        if self.pairs:
            first, last = (ends[rows] for ends in self._packed)
        shape = len(rows), self._size
        tokens = np.zeros(shape, dtype=np.int64)
        targets, begins = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
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

    @cached_property
    def _packed(self) -> tuple[Indices, Indices]:
        """Where each row of pairs begins and ends, in tokens (n,)."""
        firsts, lasts = [], []
        self.cut = self.left_out = 0
        for info, offset in zip(self._shards, self._starts, strict=False):
            shard = self.corpus.shard(info)
            ends = shard.ends
            starts = np.concatenate([[0], ends])[:-1]
            usable = np.ones(len(ends), dtype=bool)
            long = np.flatnonzero(ends - starts > self._size)
            for pair in long.tolist():
                mask = self.corpus.shard(info, loss=True)
                start = int(starts[pair])
                usable[pair] = mask.read(start + 1, start + self._size).any()
            self.cut, self.left_out = self.cut + len(long), self.left_out + int((~usable).sum())
            # The first pair that no longer fits into the row of each, or that is not usable.
            fits = np.searchsorted(ends, starts + self._size, side="right")
            unusable = np.append(np.flatnonzero(~usable), len(ends))
            stops = np.minimum(fits, unusable[np.searchsorted(unusable, np.arange(len(ends)))])
            nexts, pair = np.maximum(stops, np.arange(len(ends)) + 1).tolist(), 0
            while pair < len(ends):
                if usable[pair]:
                    firsts.append(int(starts[pair] + offset))
                    stop = min(ends[nexts[pair] - 1], starts[pair] + self._size)
                    lasts.append(int(stop + offset))
                pair = nexts[pair]
        return np.array(firsts, dtype=np.int64), np.array(lasts, dtype=np.int64)


def open_rows(
    config: Any, section: Section = "training", world_size: int | None = None
) -> tuple[list[Part], list[Rows]]:
    """Open the corpora of a run: what it trains on, or the held-out part that it validates on.

    Args:
        config: The run's ``JobConfig``, or its saved record.
        section: Training or validation.
        world_size: As for `ensure_prepared`, which prepares what is missing.

    Returns:
        The prepared folders and the rows of each.

    Raises:
        ConfigError: As for `ensure_prepared`, or a part has no whole row.
        DataError: As for `ensure_prepared`.
    """
    parts = ensure_prepared(config, section, world_size)
    masked = getattr(config.training, "mask_documents", False)
    seq_len, held_out = getattr(config, section).seq_len, section == "validation"
    opened = []
    for part in parts:
        corpus = Corpus.open(part.folder)
        if held_out and not corpus.held_out:
            want = "another corpus, or false for validation.enable: "
            raise ConfigError("validation.dataset", part.name, want + "nothing of it is held out")
        opened.append(Rows(corpus, seq_len, held_out, masked, section))
    return parts, opened


def check_corpora(config: Any, world_size: int) -> None:
    """Check the corpora of a run; prepare them if that was not done.

    Raises:
        ConfigError: A corpus that does not exist or cannot be prepared, that has no whole row, or
            a validation corpus with training files.
        DataError: A record or a shard is unreadable.
    """
    validates = config.validation.enable
    trained = wanted(config, "training", world_size)
    if validates and config.validation.dataset == "local":
        _check_other_files(wanted(config, "validation", world_size), trained)
    _warn_of_cut_pairs(open_rows(config, "training", world_size)[1], "training")
    if not validates:
        return
    section = config.validation
    held_out = open_rows(config, "validation", world_size)[1]
    _warn_of_cut_pairs(held_out, "validation")
    rows = sum(map(len, held_out))
    batch = section.local_batch_size * data_ranks(config, world_size)
    if rows < batch:
        logger.warning(
            "The held-out part has %d sequences of %d tokens, fewer than a validation batch of %d",
            *(rows, section.seq_len, batch),
        )


def _warn_of_cut_pairs(opened: list[Rows], key: str) -> None:
    for part in (part for part in opened if part.pairs and part.cut):
        logger.warning(
            "%d pairs of %s are longer than %s.seq_len = %d and are cut; %d of them have no room "
            "for an answer and are left out",
            *(part.cut, part.corpus.folder, key, part.seq_len, part.left_out),
        )


def _check_other_files(validated: list[Wanted], trained: list[Wanted]) -> None:
    """Raise if the named validation corpus contains training files."""

    def files(parts: list[Wanted]) -> set[str]:
        sources = (source for part in parts for source in part.sources if source.name == "local")
        return {str(file.resolve()) for source in sources for file in Reader(source).files}

    if shared := sorted(files(validated) & files(trained)):
        advice = "validation.dataset = 'training' takes what is held out from it"
        want = f"files that are not trained on ({shared[0]} is); {advice}"
        raise ConfigError("validation.dataset_path", str(validated[0].sources[0]), want)


def labelled(
    tokens: npt.NDArray[np.int64],
    targets: npt.NDArray[np.bool_] | None = None,
    begins: npt.NDArray[np.bool_] | None = None,
) -> Arrays:
    """Make inputs and labels of rows.

    Args:
        tokens: (b, s + 1).
        targets: Which tokens count in the loss (b, s + 1); None if all do.
        begins: Which tokens are the first of a document, where these are kept apart (b, s + 1).
    """
    labels = tokens[:, 1:].copy()
    if targets is not None:
        labels[~targets[:, 1:]] = IGNORE_INDEX
    inputs = {"input": tokens[:, :-1].copy()}
    if begins is not None:
        labels[begins[:, 1:]] = IGNORE_INDEX
        inputs[DOCUMENTS] = np.cumsum(begins[:, :-1], axis=1, dtype=np.int64)
    return inputs, labels


def read_parts(parts: Sequence[Rows], chosen: Indices, numbers: Indices) -> Arrays:
    """Read rows of several parts, in the order that is given.

    Args:
        parts: Parts with the same ``seq_len``.
        chosen: Which part each row is of (b,).
        numbers: Its number in that part (b,).

    Returns:
        The batch. Where one part keeps its documents apart, those of the others are one per row.
    """
    apart = any(part.apart for part in parts)
    first = int(chosen[0])
    if (chosen == first).all() and parts[first].apart == apart:
        return parts[first].read(numbers)
    labels = np.zeros((len(chosen), parts[0].seq_len), dtype=np.int64)
    inputs = {name: np.zeros_like(labels) for name in ["input", *[DOCUMENTS] * apart]}
    for index in np.unique(chosen).tolist():
        places = chosen == index
        own_inputs, labels[places] = parts[index].read(numbers[places])
        for name, values in own_inputs.items():
            inputs[name][places] = values
    return inputs, labels


def as_batch(arrays: Arrays) -> Batch:
    """Return a batch of tensors with the memory of these arrays."""
    import torch  # imported late: the launcher checks the lengths of corpora without it

    inputs, labels = arrays
    return {name: torch.from_numpy(x) for name, x in inputs.items()}, torch.from_numpy(labels)


def model_arguments(input_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's keyword arguments of a batch: all but the tokens."""
    return {name: value for name, value in input_dict.items() if name != "input"}


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """Return a batch on a device."""
    inputs, labels = batch
    return {name: value.to(device) for name, value in inputs.items()}, labels.to(device)
