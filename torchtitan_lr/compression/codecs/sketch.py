# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TAGC's codec: an index of the sent entries and a count sketch of their values.

A sketch is linear: the sum of the ranks' sketches is the sketch of their sum, so one reduce-scatter
adds them, also if ranks send different entries. The index names the entries in the sum, and the
owner peels: a cell with one unknown entry gives its value, which is then subtracted from its other
cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compression.codecs.base import Codec, Decoded, Message
from torchtitan_lr.compression.codecs.bitmap import mark, pack, union, unpack
from torchtitan_lr.compression.codecs.compiled import fused
from torchtitan_lr.compression.codecs.hashing import cells_and_signs
from torchtitan_lr.compression.codecs.sparsify import largest, left_over
from torchtitan_lr.compression.peeling import (
    HASH_ROWS,
    load_limit,
    peels,
    sketch_row,
    smallest_theta,
    unit_load,
)
from torchtitan_lr.compression.sizes import (
    VALUE_BYTES,
    CodecSizes,
    candidates,
    kept_entries,
    packed_bytes,
    verdict_block,
)
from torchtitan_lr.errors import ConfigError

ROUNDS = 24
"""Rounds of peeling; a million entries take 17 at the limit of 0.75, and 12 at 0.7."""

ROUNDS_PER_GRAPH = 8
"""Rounds that an accelerator runs as one compiled graph: three graphs for all rounds."""


class SketchCodec(Codec):
    """Count sketch with an index: 1 + 32/c bits per parameter.

    The exact index exchanges bitmaps, and the owner combines them by OR. For comparison the index
    can be summed as published (by a reduce-scatter here, because only the owner needs it): an entry
    that two ranks send carries into the next bit, and the sum is silently wrong.

    Entries that do not peel are not lost: the owner zeroes their blocks and reports them.

    The only state is the residual (W, m); hash seeds follow from the number of the exchange.

    Args:
        ranks: Ranks W.
        c: Entries per cell.
        theta: Share of unsent entries, in [0, 1).
        index: ``exact`` or ``sum1``.
        rounds: Rounds of peeling.
    """

    name = "sketch"
    size_limit = "a sketch to peel"

    def __init__(
        self, ranks: int, c: float, theta: float, index: str = "exact", rounds: int = ROUNDS
    ) -> None:
        self.ranks, self.c, self.theta = ranks, c, theta
        self.index, self.rounds = index, rounds

    @classmethod
    def resolve(cls, section: Any, c: float, theta: float, ranks: int) -> CodecSizes:
        """Return the parameters, with a θ that peels for ``auto``; see `Codec.resolve`.

        Raises:
            ConfigError: The sketch would not peel; the message has the smallest θ that works.
        """
        if ranks > 1 and not peels(c, theta, ranks):
            least = smallest_theta(c, ranks)
            if not section.auto:
                key = "theta" if section.level == "custom" else "level"
                want = (
                    f"a theta of at least {least} (level = 'custom', c = {c:g}), or auto = true: "
                    f"on {ranks} ranks c*(1 - theta^ranks) is {c * (1 - theta**ranks):.3f} at "
                    f"theta {theta:g}, and above 0.75 a sketch does not peel"
                )
                got = theta if section.level == "custom" else section.level
                raise ConfigError(f"grad_compression.{key}", got, want)
            theta = least
        return CodecSizes(cls.name, c, theta, section.index)

    @classmethod
    def build(cls, sizes: CodecSizes, ranks: int) -> SketchCodec:
        """Build the codec for W ranks; see `Codec.build`."""
        return cls(ranks, sizes.c, sizes.theta, sizes.index)

    def message_bytes(self, m: int) -> dict[str, int]:
        """Return the bytes of index, cells and the owner's verdict; see `Codec.message_bytes`."""
        return {
            "index": packed_bytes(m),
            "sketch": VALUE_BYTES * HASH_ROWS * sketch_row(m, self.c),
            "verdict": packed_bytes(-(-m // verdict_block(m))),
        }

    def bits(self) -> dict[str, float]:
        """Return 1 bit of the index and 32/c of cells.

        The verdict has at most 128 bytes per destination, which vanishes for large tensors.
        """
        return {"index": 1.0, "sketch": 32 / self.c}

    def decodes(self, m: int) -> bool:
        """Return whether a sketch of m entries peels all but a few percent."""
        if self.ranks == 1:
            return True
        load = unit_load(m, self.c, self.theta, self.ranks)
        return load <= load_limit(m, self.c) + 1e-12

    def describe(self) -> str:
        """Return name, c and index."""
        return f"{self.name} (c = {self.c:g}, index {self.index})"

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send the index and a sketch for each owner (W, 3·row); see `Codec.encode`."""
        m = rows.shape[1]
        positions, values = largest(rows, self.theta)
        message = Message(positions=positions, values=values)
        message.summed["sketch"] = insert(positions, values, sketch_row(m, self.c), seed)
        if self.index == "exact":
            # Zeros are not in the index: with fewer unknowns, peeling is more reliable.
            message.swapped["index"] = pack(mark(positions, m, values != 0))
        else:
            message.summed["index"] = pack(mark(positions, m))
        return message

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Peel the summed sketch; see `Codec.decode`.

        The counts are ``unpeeled`` and ``indexed`` entries, and ``collisions`` of a summed index.
        """
        index = received["index"]
        marked = unpack(union(index) if self.index == "exact" else index, m)
        unknown = marked.nonzero_static(size=candidates(self.ranks, m, self.theta), fill_value=m)
        unknown = unknown.flatten()
        # On an accelerator, the number of remaining entries would need a host synchronisation.
        solve = peel_remaining if unknown.device.type == "cpu" else peel
        values, stuck = solve(received["sketch"], unknown, m, seed, self.rounds)
        total = values.new_zeros(m + 1).index_copy_(0, unknown.clamp(max=m), values)[:m]
        failed, verdict = _judge(unknown, stuck, m)
        counts = {"unpeeled": stuck.sum(), "indexed": marked.sum()}
        if self.index == "sum1":
            sent = self.ranks * kept_entries(m, self.theta)
            # An addition loses one set bit per carry.
            counts["collisions"] = sent - marked.sum()
        return Decoded(total.masked_fill(failed, 0), verdict, counts)

    def unsent(self, rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
        """Return the unsent entries and those of failed blocks (W, m)."""
        assert message.positions is not None and message.values is not None
        return left_over(rows, message.positions, message.values, verdicts)


def insert(positions: Tensor, values: Tensor, row: int, seed: int) -> Tensor:
    """Return the sketches (W, 3·row) of entries (W, k) with their values (W, k)."""
    cells, negative = cells_and_signs(positions, row, seed)
    signed = torch.where(negative, -values, values)
    sketch = values.new_zeros(values.shape[0], HASH_ROWS * row)
    for r in range(HASH_ROWS):
        sketch.scatter_add_(1, cells[r], signed[r])
    return sketch


def peel(sketch: Tensor, unknown: Tensor, m: int, seed: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Solve a sketch for its entries (TAGC, decompression).

    Each round reads all entries that are alone in one of their three cells, and subtracts them from
    their other two cells. The index alone determines these entries. Every round visits all
    entries, so there is no host synchronisation; an accelerator runs several rounds as one graph.

    Args:
        sketch: (3·row,).
        unknown: Entries in the sketch (u,), int64; m is padding.
        m: Entries of the row.
        seed: Seed of the step.
        rounds: Number of rounds.

    Returns:
        Values (u,), and a mask of the entries that remain unknown (u,), bool.
    """
    content, load, cells, negative = _loaded(sketch, unknown, m, seed)
    values = sketch.new_zeros(unknown.shape)
    remains = unknown < m
    while rounds > 0:
        count = min(rounds, ROUNDS_PER_GRAPH)
        values, remains = _peel_rounds(content, load, cells, negative, values, remains, count)
        rounds -= count
    return values, remains


@fused
def _peel_rounds(
    content: Tensor,
    load: Tensor,
    cells: Tensor,
    negative: Tensor,
    values: Tensor,
    remains: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Peel ``count`` rounds; content and load change in place.

    Compiled, a round is two kernels: one chooses the entries, one takes them out of their cells.
    Masks of all three rows at once would be a third.
    """
    for _ in range(count):
        lone = [load[row] == 1 for row in cells]
        signed = [content[row] for row in cells]
        read = [torch.where(n, -x, x) for n, x in zip(negative, signed, strict=True)]
        # From the first cell in which an entry is alone.
        first = torch.where(lone[0], read[0], torch.where(lone[1], read[1], read[2]))
        ready = (lone[0] | lone[1] | lone[2]) & remains
        taken = torch.where(ready, first, 0)
        content.index_put_((cells,), torch.where(negative, taken, -taken), accumulate=True)
        load.index_put_((cells,), -ready.int(), accumulate=True)
        values = torch.where(ready, first, values)
        remains = remains & ~ready
    return values, remains


def peel_remaining(
    sketch: Tensor, unknown: Tensor, m: int, seed: int, rounds: int
) -> tuple[Tensor, Tensor]:
    """Peel by visiting only the remaining entries: several times faster than `peel` on a CPU.

    Arguments and results are those of `peel`, bit by bit.
    """
    content, load, cells, negative = _loaded(sketch, unknown, m, seed)
    values = sketch.new_zeros(unknown.shape)
    places = (unknown < m).nonzero().flatten()
    cells, negative = _pick(places, cells, negative)
    for _ in range(rounds):
        if not len(places):
            break
        alone, first = _alone(load, cells)
        taken = _pick(alone.nonzero().flatten(), places, cells, negative, first)
        values.index_copy_(0, taken[0], _take_out(content, load, *taken[1:]))
        places, cells, negative = _pick((~alone).nonzero().flatten(), places, cells, negative)
    remains = torch.zeros_like(unknown, dtype=torch.bool).index_fill_(0, places, True)
    return values, remains


def _loaded(
    sketch: Tensor, unknown: Tensor, m: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return content and load of every cell (3·row + 1,), and cells and signs of the entries.

    Padding falls into the spare cell at the end.
    """
    spare = sketch.numel()
    cells, negative = cells_and_signs(unknown, spare // HASH_ROWS, seed)
    cells = torch.where(unknown < m, cells, spare)
    load = torch.zeros(spare + 1, dtype=torch.int32, device=sketch.device)
    load.scatter_add_(0, cells.flatten(), (unknown < m).int().repeat(HASH_ROWS))
    return pad(sketch, (0, 1)), load, cells, negative


def _pick(which: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Select entries along the last dimension; advanced indexing is several times slower."""
    return tuple(tensor.index_select(-1, which) for tensor in tensors)


def _alone(load: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of entries (u,) alone in a cell, and the row of the first such cell (1, u)."""
    alone = load.take(cells) == 1
    first = torch.where(alone[0], 0, torch.where(alone[1], 1, 2))
    return alone.any(0), first.unsqueeze(0)


def _take_out(
    content: Tensor, load: Tensor, cells: Tensor, negative: Tensor, first: Tensor
) -> Tensor:
    """Return the values of entries (u,) by their first lone cells; subtract them from all cells."""
    read = content.take(cells.gather(0, first))
    read = torch.where(negative.gather(0, first), -read, read)[0]
    flat = cells.flatten()
    content.scatter_add_(0, flat, torch.where(negative, read, -read).flatten())
    load.scatter_add_(0, flat, load.new_full(flat.shape, -1))
    return read


def _judge(unknown: Tensor, stuck: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the entries in failed blocks (m,), and the packed verdict."""
    block = verdict_block(m)
    blocks = -(-m // block)
    failed = torch.zeros(blocks + 1, dtype=torch.int32, device=unknown.device)
    failed.scatter_add_(0, (unknown // block).clamp(max=blocks), stuck.int())
    failed = failed[:blocks] > 0
    return failed.repeat_interleave(block)[:m], pack(failed)
