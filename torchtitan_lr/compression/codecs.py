# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient codecs: reductions of W rows of a gradient, one for each owning rank.

A reduction has four phases, each without a host synchronisation: the codec's ``encode`` converts
this rank's rows to a message; `exchange` runs its collectives; ``decode`` returns the owner's sum
and its failed blocks; `left_over` returns this rank's residual. A row's sum plus its residuals on
all ranks equals the sum of the inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compat.process_groups import reduce_scatter

F = TypeVar("F", bound=Callable[..., Any])

FAILURE_BITS = 1024  # the most blocks per destination of which an owner says if they failed


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


@dataclass(frozen=True)
class Codec:
    """A codec with its settings; an exchange calls `encode` and `decode` on every rank.

    Both also run on ``meta`` tensors, whose shapes say what an exchange sends.
    """

    ranks: int  # W, which exchange a gradient
    c: float = 1.0  # entries per cell of a sketch
    theta: float = 0.0  # share of unsent entries of a rank, in [0, 1)
    half: bool = False  # whether values travel in bf16; their owner adds them in fp32

    sends_all: ClassVar[bool] = False  # whether a rank sends every entry: ``theta`` has no effect
    can_round: ClassVar[bool] = False  # whether ``half`` may be set

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Return what this rank sends of its gradient plus residual (W, m), row i for owner i."""
        raise NotImplementedError

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Return the owner's sum (m,) of swapped tensors (W, a), by rank, and summed ones (a,)."""
        raise NotImplementedError

    def decodes(self, m: int) -> bool:
        """Return whether an owner of m entries can decode nearly all that the ranks send it."""
        return True


@dataclass(frozen=True)
class SparseCodec(Codec):
    """The largest entries as a bitmap and values, exact: 1 + b(1 − θ) bits, b = 32 or 16."""

    can_round: ClassVar[bool] = True

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send bitmaps, and values in the order of their bits; see `Codec.encode`."""
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
        """Add the ranks' entries in the order of the ranks; see `Codec.decode`."""
        values = received["values"]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        places = _positions(unpack(received["index"], m), values.shape[1]).flatten()
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


def exchange(message: Message, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Run a message's collectives: one all-to-all per tensor, one reduce-scatter for all sums."""
    received = {}
    for name, tensor in message.swapped.items():
        received[name] = torch.empty_like(tensor)
        dist.all_to_all_single(received[name], tensor, group=group)
    if message.summed:
        # One call for the sketch and the dense entries: a second one would cost its latency.
        parts = list(message.summed.values())
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        own = whole.new_empty(whole.shape[1])
        reduce_scatter(own, whole.flatten(), group=group)
        sizes = [part.shape[1] for part in parts]
        received |= dict(zip(message.summed, own.split(sizes), strict=True))
    return received


def fused(function: F) -> F:
    """Compile an element-wise function, of a tensor first, to one kernel of an accelerator."""
    # Sizes and integers stay symbolic: seeds differ in every step and must not cause recompilation.
    # At the first call, since `torch.compile` imports the compiler, which takes seconds.
    compiled = cache(lambda: torch.compile(function, dynamic=True))

    @wraps(function)
    def call(*args: Any) -> Any:
        plain = args[0].device.type in ("cpu", "meta")
        return (function if plain else compiled())(*args)

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


def kept_entries(m: int, theta: float) -> int:
    """Return the number of sent entries of m: at most a share 1 − θ, at least one."""
    # The small number because 0.9·10 is slightly more than 9 in floating point.
    return min(m, max(1, m - math.ceil(theta * m - 1e-9 * m)))


def union_entries(ranks: int, m: int, theta: float) -> int:
    """Return the largest number of distinct entries that W ranks can send to one destination."""
    return min(m, ranks * kept_entries(m, theta))


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


def failure_block(m: int) -> int:
    """Return the number of consecutive entries per bit of `Decoded.failed`."""
    return -(-m // FAILURE_BITS)


def left_over(rows: Tensor, message: Message, failed: Tensor | None) -> Tensor:
    """Return a rank's residual: its rows (W, m), overwritten, without what was received."""
    # Blocks that failed at their owners (W, v) count as unsent; None if the codec cannot fail.
    left: Any = 0 if message.lost is None else message.lost
    if failed is None:
        return rows.scatter_(1, message.positions, left)
    blocks = unpack(failed, failed.shape[1] * 8)  # (W, 8 v)
    returned = blocks.gather(1, message.positions // failure_block(rows.shape[1]))  # (W, k)
    return rows.scatter_(1, message.positions, torch.where(returned, message.values, left))
