# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient codecs: reductions of W rows of a gradient, one for each owning rank.

A reduction has four phases, each without a host synchronisation: the codec's ``encode`` converts
this rank's rows to a message; `exchange` runs its collectives; ``decode`` returns the owner's sum
and its failed blocks; `left_over` returns this rank's residual. A row's sum plus its residuals on
all ranks equals the sum of the inputs.

`SparseCodec` sends the largest entries as a bitmap and values, exact for any number of ranks.
`SketchCodec` is TAGC's: an index of the sent entries and a count sketch of their values. The sum of
the ranks' sketches is the sketch of their sum, so one reduce-scatter adds them. The index names the
entries in the sum, and the owner peels: a cell with one unknown entry gives its value, which is
then subtracted from its other cells.

The published index is a sum of the ranks' bits: an entry that two ranks send carries into the next
bit, and the sum is silently wrong. Here the ranks swap bitmaps, and the owner joins them by OR.
"""

import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compat.process_groups import all_gather, reduce_scatter
from torchtitan_lr.compression.sizes import (
    HASH_ROWS,
    CodecSizes,
    candidates,
    failure_block,
    kept_entries,
    sketch_row,
)

F = TypeVar("F", bound=Callable[..., Any])

ROUNDS = 24  # of peeling; a million entries take 17 at the limit of 0.75, and 12 at 0.7
ROUNDS_PER_GRAPH = 8  # that an accelerator runs as one compiled graph

_MASK = 0xFFFFFFFF


@dataclass
class Message:
    """The tensors that one rank sends in one exchange."""

    positions: Tensor  # sent entries (W, k) of every row
    values: Tensor  # the values of these entries (W, k), before any rounding
    # Tensors (W, a): row i goes to rank i as it is (all-to-all), or is summed there over ranks
    # (reduce-scatter).
    swapped: dict[str, Tensor] = field(default_factory=dict)
    summed: dict[str, Tensor] = field(default_factory=dict)
    lost: Tensor | None = None  # what rounding takes from the sent values (W, k), if any


@dataclass
class Decoded:
    """An owner's result of an exchange."""

    total: Tensor  # sum over ranks of the sent entries (m,); zero in failed blocks
    # Packed bits (v,), one per block of consecutive entries, set if the block could not be
    # decoded; None if the codec cannot fail.
    failed: Tensor | None = None
    counts: dict[str, Tensor] = field(default_factory=dict)  # for the metrics, scalars by name


Works = list[dist.Work]  # started collectives
Result = TypeVar("Result")
# A computation that starts collectives, yields them, and is resumed when they are done.
Resumable = Generator[Works, None, Result]


def complete(computation: Resumable[Result], works: Works | None = None) -> Result:
    """Run a `Resumable` to its end, after the collectives that it has started already."""
    while True:
        for work in works or ():
            work.wait()
        try:
            works = next(computation)
        except StopIteration as end:
            return cast(Result, end.value)


def exchange(message: Message, group: dist.ProcessGroup) -> Resumable[dict[str, Tensor]]:
    """Run a message's collectives: one all-to-all per tensor, one reduce-scatter for all sums."""
    received, works = {}, []
    for name, tensor in message.swapped.items():
        received[name] = torch.empty_like(tensor)
        works.append(dist.all_to_all_single(received[name], tensor, group=group, async_op=True))
    if message.summed:
        # One call for the sketch and the dense entries: a second one would cost its latency.
        parts = list(message.summed.values())
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        own = whole.new_empty(whole.shape[1])
        works.append(reduce_scatter(own, whole.flatten(), group=group, async_op=True))
        sizes = [part.shape[1] for part in parts]
        received |= dict(zip(message.summed, own.split(sizes), strict=True))
    yield works
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Resumable[Tensor]:
    """Return every rank's tensor (a,) as rows (W, a)."""
    rows = tensor.new_empty(group.size() * tensor.numel())
    yield [all_gather(rows, tensor.contiguous(), group=group, async_op=True)]
    return rows.view(group.size(), -1)


def fused(function: F) -> F:
    """Compile an element-wise function, of a tensor first, to one kernel, but not for a CPU."""
    # Sizes and integers stay symbolic: seeds differ in every step and must not cause recompilation.
    # At the first call, since `torch.compile` imports the compiler, which takes seconds.
    compiled = cache(lambda: torch.compile(function, dynamic=True))

    @wraps(function)
    def call(*args: Any) -> Any:
        return (function if args[0].device.type == "cpu" else compiled())(*args)

    return cast(F, call)


@fused
def pack(mask: Tensor) -> Tensor:
    """Pack truth values (..., m), the first one into the lowest bit: (..., ⌈m/8⌉), uint8."""
    padded = pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8))
    fields = padded.unflatten(-1, (-1, 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    # The fields do not overlap: their sum is their OR, and stays below 256.
    return (fields << shifts).sum(-1, dtype=torch.uint8)


@fused
def unpack(packed: Tensor, m: int) -> Tensor:
    """Return the mask (..., m) of packed bits (..., ⌈m/8⌉)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fields = (packed.unsqueeze(-1) >> shifts) & 1
    return fields.flatten(-2)[..., :m].bool()


def union(packed: Tensor) -> Tensor:
    """OR the packed bitmaps (W, b) of all ranks."""
    # By halves, as torch has no reduction by OR: a row after another would be W kernels.
    while len(packed) > 1:
        half = len(packed) // 2
        joined = packed[:half] | packed[half : 2 * half]
        packed = joined if len(packed) % 2 == 0 else torch.cat([joined, packed[-1:]])
    return packed[0]


def largest(rows: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Return positions (W, k), int64, and values of the largest entries by magnitude."""
    # Each row (W, m) has exactly ``kept_entries(m, theta)``, so that it reaches θ; the published
    # threshold, estimated from a sample, does not. A NaN counts as the largest and is sent.
    m = rows.shape[1]
    k = kept_entries(m, theta)
    if k == m:
        return torch.arange(m, device=rows.device).expand(rows.shape), rows.clone()
    positions = rows.abs().topk(k, dim=1, sorted=False).indices
    return positions, rows.gather(1, positions)


def left_over(rows: Tensor, message: Message, failed: Tensor | None) -> Tensor:
    """Return a rank's residual: its rows (W, m), overwritten, without what was received."""
    # Blocks that failed at their owners (W, v) count as unsent; None if the codec cannot fail.
    left: Any = 0 if message.lost is None else message.lost
    if failed is None:
        return rows.scatter_(1, message.positions, left)
    blocks = unpack(failed, failed.shape[1] * 8)  # (W, 8 v)
    returned = blocks.gather(1, message.positions // failure_block(rows.shape[1]))  # (W, k)
    return rows.scatter_(1, message.positions, torch.where(returned, message.values, left))


class Codec(Protocol):
    """What a codec does; an exchange calls both methods on every rank."""

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Return what this rank sends of its gradient plus residual (W, m), row i for owner i."""

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Return the owner's sum (m,) of swapped tensors (W, a), by rank, and summed ones (a,)."""


@dataclass(frozen=True)
class SparseCodec:
    """Exactly k entries for each destination: 1 + 32(1 − θ) bits a parameter, or 1 + 16(1 − θ)."""

    theta: float  # share of unsent entries, in [0, 1)
    half: bool = False  # whether values travel in bf16; their owner adds them in fp32

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send bitmaps, and values in the order of their bits; see `SketchCodec.encode`."""
        chosen, _ = largest(rows, self.theta)
        marked = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, chosen, True)
        positions = _positions(marked, chosen.shape[1])
        values = rows.gather(1, positions)
        message = Message(positions, values, {"index": pack(marked), "values": values})
        if self.half:
            sent = message.swapped["values"] = values.bfloat16()
            message.lost = values - sent
        return message

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Add the ranks' entries in the order of the ranks; see `SketchCodec.decode`."""
        values = received["values"]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        k = values.shape[1]
        if k != kept_entries(m, self.theta):
            raise ValueError(f"{k} values a rank for {m} entries at theta {self.theta}")
        places = _positions(unpack(received["index"], m), k).flatten()
        total = values.new_zeros(m)
        # Both add in a fixed order: accelerators sort `index_put_`'s places, where `index_add_`
        # would add atomically. On CPUs `index_add_` is the deterministic one.
        if total.device.type == "cpu":
            return Decoded(total.index_add_(0, places, values.flatten()))
        return Decoded(total.index_put_((places,), values.flatten(), accumulate=True))


def _positions(marked: Tensor, k: int) -> Tensor:
    """Return the k set entries of every row of a mask (W, m), ascending: (W, k)."""
    w, m = marked.shape
    return marked.flatten().nonzero_static(size=w * k).view(w, k) % m


@dataclass(frozen=True)
class SketchCodec:
    """Count sketch with an index: 1 + 32/c bits per parameter, or 1 + 16/c."""

    ranks: int
    c: float  # entries per cell
    theta: float  # share of unsent entries, in [0, 1)
    rounds: int = ROUNDS
    half: bool = False  # whether cells travel in bf16; their owner adds them in fp32

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Choose the entries to send: the index, and a sketch for each owner (W, 3·row)."""
        m = rows.shape[1]
        positions, values = largest(rows, self.theta)
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
        marked = unpack(union(received["index"]), m)
        sent = candidates(self.ranks, m, self.theta)
        unknown = marked.nonzero_static(size=sent, fill_value=m).flatten()
        # On an accelerator, the number of remaining entries would need a host synchronisation.
        solve = peel_remaining if unknown.device.type == "cpu" else peel
        sketch = received["sketch"]
        if self.half:
            sketch = sketch.sum(0, dtype=torch.float32)
        values, stuck = solve(sketch, unknown, m, seed, self.rounds)
        total = values.new_zeros(m + 1).index_copy_(0, unknown.clamp(max=m), values)[:m]
        # A block fails if one of its entries is stuck; padding falls behind the last block.
        block = failure_block(m)
        blocks = -(-m // block)
        failed = torch.zeros(blocks + 1, dtype=torch.int32, device=unknown.device)
        failed.scatter_add_(0, (unknown // block).clamp(max=blocks), stuck.int())
        failed = failed[:blocks] > 0
        total = total.masked_fill(failed.repeat_interleave(block)[:m], 0)
        return Decoded(total, pack(failed), {"unpeeled": stuck.sum(), "indexed": marked.sum()})


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
    # from their other two cells. The index alone determines these entries. Every round visits all
    # entries, so there is no host synchronisation; an accelerator runs several rounds as one graph.
    # Returns values (u,), and a mask of the entries that remain unknown (u,).
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
    """Peel ``count`` rounds; content and load change in place."""
    # Compiled, a round is two kernels: one chooses the entries, one takes them out of their cells.
    # Masks of all three rows at once would be a third.
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
    """Do as `peel`, bit by bit, visiting the remaining entries alone: far faster on a CPU."""
    content, load, cells, negative = _loaded(sketch, unknown, m, seed)
    values = sketch.new_zeros(unknown.shape)
    places = (unknown < m).nonzero().flatten()
    # `index_select` throughout: advanced indexing is several times slower.
    cells, negative = (t.index_select(-1, places) for t in (cells, negative))
    for _ in range(rounds):
        if not len(places):
            break
        lone = load.take(cells) == 1
        alone = lone.any(0)
        # From the first cell in which an entry is alone, as in `peel`.
        first = torch.where(lone[0], 0, torch.where(lone[1], 1, 2)).unsqueeze(0)
        tensors, ready = (places, cells, negative, first), alone.nonzero().flatten()
        taken, of, minus, first = (t.index_select(-1, ready) for t in tensors)
        read = content.take(of.gather(0, first))
        read = torch.where(minus.gather(0, first), -read, read)[0]
        flat = of.flatten()
        content.scatter_add_(0, flat, torch.where(minus, read, -read).flatten())
        load.scatter_add_(0, flat, load.new_full(flat.shape, -1))
        values.index_copy_(0, taken, read)
        rest = (~alone).nonzero().flatten()
        places, cells, negative = (t.index_select(-1, rest) for t in (places, cells, negative))
    remains = torch.zeros_like(unknown, dtype=torch.bool).index_fill_(0, places, True)
    return values, remains


def _loaded(
    sketch: Tensor, unknown: Tensor, m: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return content and load of every cell (3·row + 1,), and cells and signs of the entries."""
    # Padding falls into the spare cell at the end.
    spare = sketch.numel()
    cells, negative = cells_and_signs(unknown, spare // HASH_ROWS, seed)
    cells = torch.where(unknown < m, cells, spare)
    load = torch.zeros(spare + 1, dtype=torch.int32, device=sketch.device)
    load.scatter_add_(0, cells.flatten(), (unknown < m).int().repeat(HASH_ROWS))
    return pad(sketch, (0, 1)), load, cells, negative


CODECS: dict[str, Callable[[int, CodecSizes], Codec]] = {
    "sparse": lambda ranks, sizes: SparseCodec(sizes.theta, sizes.half),
    "sketch": lambda ranks, sizes: SketchCodec(ranks, sizes.c, sizes.theta, half=sizes.half),
}
"""Builds a codec by its name, given the ranks W and the configured sizes."""
