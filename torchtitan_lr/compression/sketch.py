# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TAGC's codec: an index of the sent entries and a count sketch of their values.

The sum of the ranks' sketches is the sketch of their sum, so one reduce-scatter adds them. The
index names the entries in the sum, and the owner peels: a cell with one unknown entry gives its
value, which is then subtracted from its other cells.

The published index is a sum of the ranks' bits: an entry that two ranks send carries into the next
bit, and the sum is silently wrong. Here the ranks swap bitmaps, and the owner joins them by OR.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compression import codecs
from torchtitan_lr.compression.codecs import Codec, Decoded, Message, fused, pack, unpack

HASH_ROWS = 3  # of the count sketch
ROUNDS = 24  # of peeling; a million entries take 17 at the limit of 0.75, and 12 at 0.7
ROUNDS_PER_GRAPH = 8  # that an accelerator runs as one compiled graph
HOSTS = ("cpu",)  # devices whose values the host reads without waiting

PEELING_LIMIT = 0.75  # largest accepted c·(union density); peeling fails between .78 and .82
SHARP_LIMIT = 0.818  # load at which peeling fails in an infinitely large sketch of three rows

# A small sketch fails earlier: at `SHARP_LIMIT` minus this times row^(-2/3). At that load 3 to 9%
# of the entries remain, on 2 to 8 ranks with 3 or more cells per row (measured). From 75 cells on,
# `PEELING_LIMIT` is the smaller limit, and fewer entries remain.
SMALL_SKETCH = 1.2

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class SketchCodec(Codec):
    """Count sketch with an index: 1 + 32/c bits per parameter, or 1 + 16/c."""

    can_round: ClassVar[bool] = True

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Choose the entries to send: the index, and a sketch for each owner (W, 3·row)."""
        m = rows.shape[1]
        positions, values = codecs.largest(rows, self.theta)
        row = sketch_row(m, self.c)
        sent = cut_to_cells(positions, values, row, seed) if self.half else values
        # Zeros are not in the index: with fewer unknowns, peeling is more reliable.
        marked = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, positions, sent != 0)
        cells = insert(positions, sent, row, seed)
        message = Message(positions, values, {"index": pack(marked)})
        if self.half:
            message.swapped["sketch"] = cells.bfloat16()  # exact, after the cut
            message.lost = values - sent
        else:
            message.summed["sketch"] = cells
        return message

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Peel the summed sketch; the counts are ``unpeeled`` and ``indexed`` entries."""
        marked = unpack(received["index"], m).any(0)
        sent = codecs.union_entries(self.ranks, m, self.theta)
        unknown = marked.nonzero_static(size=sent, fill_value=m).flatten()
        sketch = received["sketch"]
        if self.half:
            sketch = sketch.sum(0, dtype=torch.float32)
        values, stuck = peel(sketch, unknown, m, seed, ROUNDS)
        total = values.new_zeros(m + 1).index_copy_(0, unknown.clamp(max=m), values)[:m]
        # A block fails if one of its entries is stuck; padding falls behind the last block.
        block = codecs.failure_block(m)
        blocks = -(-m // block)
        failed = torch.zeros(blocks + 1, dtype=torch.int32, device=unknown.device)
        failed.scatter_add_(0, (unknown // block).clamp(max=blocks), stuck.int())
        failed = failed[:blocks] > 0
        total = total.masked_fill(failed.repeat_interleave(block)[:m], 0)
        return Decoded(total, pack(failed), {"unpeeled": stuck.sum(), "indexed": marked.sum()})

    def decodes(self, m: int) -> bool:
        """Return whether an owner decodes all but a few percent of what W random ranks send it."""
        # In a small sketch, entries form an undecodable loop at lower loads (finite-size scaling of
        # random hypergraphs, with exponent 2/3).
        row = sketch_row(m, self.c)
        unknown = m * (1 - (1 - codecs.kept_entries(m, self.theta) / m) ** self.ranks)
        limit = min(PEELING_LIMIT, SHARP_LIMIT - SMALL_SKETCH * row ** (-2 / 3))
        return self.ranks == 1 or unknown / (HASH_ROWS * row) <= limit + 1e-12


def sketch_row(m: int, c: float) -> int:
    """Return the cells in each of the three rows of a sketch: ⌈⌈m/c⌉ / 3⌉."""
    return -(-math.ceil(m / c) // HASH_ROWS)


def peels(c: float, theta: float, ranks: int) -> bool:
    """Return whether a large sketch of compression c decodes: c·(1 − θ^W) ≤ 0.75."""
    # 1 − θ^W is the share of entries that any of W independent ranks sends.
    # A theta that is the smallest one but for rounding counts as peeling.
    return c * (1 - theta**ranks) <= PEELING_LIMIT + 1e-12


def smallest_theta(c: float, ranks: int) -> float:
    """Return the smallest θ at which a sketch of compression c decodes, rounded up."""
    # The steps are 0.0001, or a tenth of 1 − θ if that is less, with many ranks.
    if peels(c, 0.0, ranks):
        return 0.0
    exact = (1 - PEELING_LIMIT / c) ** (1 / ranks)
    # A step of a tenth leaves 1 − θ two digits with any number of ranks.
    step = min(1e-4, 10.0 ** (math.floor(math.log10(1 - exact)) - 1))
    theta = round(math.ceil(exact / step - 1e-6) * step, 12)
    return theta if peels(c, theta, ranks) else round(theta + step, 12)


def cells_and_signs(positions: Tensor, row: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hash entries (...), int64, below 2³², into the rows of a sketch."""
    # Returns cells (3, ...), int64, row r within [r·row, (r + 1)·row), and whether the sign is
    # negative (3, ...), bool.
    salts = [zlib.crc32(f"{seed}:{r}".encode()) for r in range(HASH_ROWS)]
    return _hash_rows(positions, row, *salts)


@fused
def _hash_rows(x: Tensor, row: int, salt_0: int, salt_1: int, salt_2: int) -> tuple[Tensor, Tensor]:
    mixed = []
    for salt in (salt_0, salt_1, salt_2):
        # MurmurHash3's finalizer scrambles 32-bit integers: multiply and shift, twice.
        # A product may wrap around int64, which leaves the 32 bits of the mask as they are.
        h = (x * 0x9E3779B1 + salt) & _MASK
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
        mixed.append(h ^ (h >> 16))
    # The high bits choose the cell without a division; the lowest bit is the sign.
    cells = torch.stack([((h * row) >> 32) + r * row for r, h in enumerate(mixed)])
    return cells, torch.stack([(h & 1).bool() for h in mixed])


def insert(positions: Tensor, values: Tensor, row: int, seed: int) -> Tensor:
    """Return the sketches (W, 3·row) of entries (W, k) with their values (W, k)."""
    cells, negative = cells_and_signs(positions, row, seed)
    signed = torch.where(negative, -values, values)
    sketch = values.new_zeros(values.shape[0], HASH_ROWS * row)
    for r in range(HASH_ROWS):
        sketch.scatter_add_(1, cells[r], signed[r])
    return sketch


def cut_to_cells(positions: Tensor, values: Tensor, row: int, seed: int) -> Tensor:
    """Cut values (W, k) towards zero so that their sketch is exact in bf16."""
    # An entry is alone in few of its cells. If cells were rounded, no rank could say by how much
    # its entries changed. So entries are rounded instead, to the steps of the coarsest of their
    # three cells: bf16's 8 bits hold 2⁸ steps, and no cell is larger than the sum of its entries'
    # magnitudes. What is cut off is known, and stays on its rank.
    cells, _ = cells_and_signs(positions, row, seed)  # (3, W, k)
    largest_sums = values.new_zeros(values.shape[0], HASH_ROWS * row)
    for own in cells:
        largest_sums.scatter_add_(1, own, values.abs())
    bounds = torch.stack([largest_sums.gather(1, own) for own in cells]).amax(0)  # (W, k)
    bounds = bounds.clamp(min=2.0**-100)  # no subnormal steps
    # A bound over its mantissa is the power of 2 above it, exactly on every device.
    steps = bounds / torch.frexp(bounds).mantissa * 2.0**-8
    return (values / steps).trunc() * steps


def peel(sketch: Tensor, unknown: Tensor, m: int, seed: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Solve a sketch (3·row,) for its entries (u,), int64, of which m is padding (TAGC)."""
    # Each round reads all entries that are alone in one of their three cells, and subtracts them
    # from their other two cells. The index alone determines these entries.
    # Returns values (u,), and a mask of the entries that remain unknown (u,).
    spare = sketch.numel()  # the cell at the end, into which padding falls
    cells, negative = cells_and_signs(unknown, spare // HASH_ROWS, seed)
    remains = unknown < m
    cells = torch.where(remains, cells, spare)
    load = torch.zeros(spare + 1, dtype=torch.int32, device=sketch.device)
    load.scatter_add_(0, cells.flatten(), remains.int().repeat(HASH_ROWS))
    content = pad(sketch, (0, 1))
    values = sketch.new_zeros(unknown.shape)
    if sketch.device.type in HOSTS:
        # Visiting the remaining entries alone is far faster than all of them.
        for _ in range(rounds):
            places = remains.nonzero().flatten()
            whole = (cells, negative, values, remains)
            at, minus, known, open_ = (each.index_select(-1, places) for each in whole)
            found, left = _peel_rounds(content, load, at, minus, known, open_, 1)
            values.index_copy_(0, places, found)
            remains.index_copy_(0, places, left)
        return values, remains
    # Every round visits all entries, so there is no host synchronisation.
    for start in range(0, rounds, ROUNDS_PER_GRAPH):
        count = min(rounds - start, ROUNDS_PER_GRAPH)
        values, remains = _peel_rounds(content, load, cells, negative, values, remains, count)
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
    """Peel ``count`` rounds; content and load change in place."""
    # Compiled, a round is two kernels: one chooses the entries, one takes them out of their cells.
    # Masks of all three rows at once would be a third.
    flat = cells.flatten()
    for _ in range(count):
        lone = [load[row] == 1 for row in cells]
        signed = [content[row] for row in cells]
        read = [torch.where(n, -x, x) for n, x in zip(negative, signed, strict=True)]
        # From the first cell in which an entry is alone.
        first = torch.where(lone[0], read[0], torch.where(lone[1], read[1], read[2]))
        ready = (lone[0] | lone[1] | lone[2]) & remains
        taken = torch.where(ready, first, 0)
        content.scatter_add_(0, flat, torch.where(negative, taken, -taken).flatten())
        load.scatter_add_(0, flat, -ready.int().repeat(HASH_ROWS))
        values = torch.where(ready, first, values)
        remains = remains & ~ready
    return values, remains
