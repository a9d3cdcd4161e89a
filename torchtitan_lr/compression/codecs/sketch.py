# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TAGC's codec: an index of what was sent and a count sketch of its values.

A sketch is linear: the sum of the ranks' sketches is the sketch of their sum, so one reduce-scatter
adds them up, whatever entries each rank chose. The owner knows from the index which entries are in
it and peels: a cell with one unknown gives that entry, which is then taken out of its other cells.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compression.codecs.base import Codec, Decoded, Message
from torchtitan_lr.compression.codecs.bitmap import mark, pack, union, unpack
from torchtitan_lr.compression.codecs.hashing import cells_and_signs
from torchtitan_lr.compression.codecs.sparsify import largest, left_over
from torchtitan_lr.compression.sizes import (
    HASH_ROWS,
    candidates,
    kept_entries,
    sketch_row,
    verdict_block,
)

Index = Literal["exact", "sum1", "sum4"]

ROUNDS = 24
"""Rounds of peeling; at the limit of 0.75 a million entries take 17, at 0.7 they take 12."""


class SketchCodec(Codec):
    """Count sketch with an index: 1 + 32/c bits per parameter.

    The index is exact where bitmaps are swapped and OR-ed by the owner. For comparison it can be
    summed as published (here by a reduce-scatter: the owner alone needs it): at 1 bit an entry that
    two ranks send carries into its neighbour and the sum is silently wrong; at 4 bits up to 15
    ranks are counted right.

    Entries that do not peel are never lost: the owner zeroes their blocks, and says which.

    Args:
        ranks: Ranks W.
        c: Entries per cell.
        theta: Share of entries that is not sent, in [0, 1).
        index: ``exact``, ``sum1`` or ``sum4``.
        rounds: Rounds of peeling.
    """

    def __init__(
        self, ranks: int, c: float, theta: float, index: Index = "exact", rounds: int = ROUNDS
    ) -> None:
        self.ranks, self.c, self.theta = ranks, c, theta
        self.index, self.rounds = index, rounds

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send the index and a sketch for each owner (W, 3·row); see `Codec.encode`."""
        m = rows.shape[1]
        positions, values = largest(rows, self.theta)
        message = Message(positions=positions, values=values)
        message.summed["sketch"] = insert(positions, values, sketch_row(m, self.c), seed)
        if self.index == "exact":
            # Zeros need no place in the index: the fewer unknowns, the surer the peeling.
            message.swapped["index"] = pack(mark(positions, m, values != 0))
        else:
            message.summed["index"] = pack(mark(positions, m), self._index_bits)
        return message

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Peel; see `Codec.decode`.

        Counts: ``unpeeled`` entries, ``indexed`` ones, and ``collisions`` of a summed index.
        """
        index = received["index"]
        if self.index == "exact":
            marked = unpack(union(index), m)
        else:
            marked = unpack(index, m, self._index_bits)
        unknown = marked.nonzero_static(size=candidates(self.ranks, m, self.theta), fill_value=m)
        unknown = unknown.flatten()
        values, stuck = peel(received["sketch"], unknown, m, seed, self.rounds)
        total = values.new_zeros(m + 1).index_copy_(0, unknown.clamp(max=m), values)[:m]
        failed, verdict = _judge(unknown, stuck, m)
        counts = {"unpeeled": stuck.sum(), "indexed": marked.sum()}
        if self.index == "sum1":
            sent = self.ranks * kept_entries(m, self.theta)
            # Adding numbers loses one set bit with every carry.
            counts["collisions"] = sent - marked.sum()
        return Decoded(total.masked_fill(failed, 0), verdict, counts)

    def unsent(self, rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
        """Return the small entries and those of failed blocks (W, m)."""
        assert message.positions is not None and message.values is not None
        return left_over(rows, message.positions, message.values, verdicts)

    @property
    def _index_bits(self) -> int:
        return 4 if self.index == "sum4" else 1


def insert(positions: Tensor, values: Tensor, row: int, seed: int) -> Tensor:
    """Return the sketches (W, 3·row) of entries (W, k) with their values (W, k)."""
    cells, negative = cells_and_signs(positions, row, seed)
    signed = torch.where(negative, -values, values)
    sketch = values.new_zeros(values.shape[0], HASH_ROWS * row)
    for r in range(HASH_ROWS):
        sketch.scatter_add_(1, cells[r], signed[r])
    return sketch


def peel(
    sketch: Tensor, unknown: Tensor, m: int, seed: int, rounds: int, compact: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Solve a sketch for the entries it holds.

    In every round all entries that are alone in one of their three cells are read off there and
    taken out of the other two. Which entries these are follows from the index alone.

    Args:
        sketch: (3·row,).
        unknown: Entries in it (u,), int64; m itself fills up the tensor.
        m: Entries of the row.
        seed: Of the step.
        rounds: How many.
        compact: Whether a round looks only at what the ones before it left. By default on a CPU: on
            an accelerator the host would have to wait for the number of these entries.

    Returns:
        Values (u,), and which entries remain unknown (u,), bool.
    """
    row = sketch.numel() // HASH_ROWS
    spare = HASH_ROWS * row  # a cell for what fills up
    cells, negative = cells_and_signs(unknown, row, seed)
    alive = unknown < m
    cells = torch.where(alive, cells, spare)
    content = pad(sketch, (0, 1))
    load = torch.zeros(spare + 1, dtype=torch.int32, device=sketch.device)
    load.scatter_add_(0, cells.flatten(), alive.int().repeat(HASH_ROWS))
    values = sketch.new_zeros(unknown.shape)
    stuck = alive.clone()
    places = torch.arange(len(unknown), device=unknown.device)
    if compact is None:
        compact = sketch.device.type == "cpu"
    for _ in range(rounds):
        if compact:
            left = alive.nonzero().flatten()
            if not len(left):
                break
            cells, negative, places, alive = _pick(left, cells, negative, places, alive)
        ready, first = _alone(load, cells, alive)
        taken: tuple[Tensor, ...] = (cells, negative, first, ready, places)
        if compact:
            taken = _pick(ready.nonzero().flatten(), *taken)
        *entries, at = taken
        values.index_add_(0, at, _take_out(content, load, *entries))
        alive = alive & ~ready
        stuck.index_copy_(0, places, alive)
    return values, stuck


def _pick(which: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Select entries along the last dimension; advanced indexing is several times slower."""
    return tuple(tensor.index_select(-1, which) for tensor in tensors)


def _alone(load: Tensor, cells: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Return which entries (u,) are alone in a cell, and the row of the first such cell (1, u)."""
    alone = (load.take(cells) == 1) & alive
    first = torch.where(alone[0], 0, torch.where(alone[1], 1, 2))
    return alone.any(0), first.unsqueeze(0)


def _take_out(
    content: Tensor, load: Tensor, cells: Tensor, negative: Tensor, first: Tensor, ready: Tensor
) -> Tensor:
    """Read off the entries (u,) that are ready, 0 for others; take them out of all their cells."""
    read = content.take(cells.gather(0, first))
    read = torch.where(negative.gather(0, first), -read, read)[0]
    read = torch.where(ready, read, 0)
    flat = cells.flatten()
    content.scatter_add_(0, flat, torch.where(negative, read, -read).flatten())
    load.scatter_add_(0, flat, -ready.int().repeat(HASH_ROWS))
    return read


def _judge(unknown: Tensor, stuck: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return which entries lie in failed blocks (m,), and the packed verdict on the blocks."""
    block = verdict_block(m)
    blocks = -(-m // block)
    failed = torch.zeros(blocks + 1, dtype=torch.int32, device=unknown.device)
    failed.scatter_add_(0, (unknown // block).clamp(max=blocks), stuck.int())
    failed = failed[:blocks] > 0
    return failed.repeat_interleave(block)[:m], pack(failed)
