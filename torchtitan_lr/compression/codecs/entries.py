# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The largest entries of a row, their index with one bit per entry, and what is left of the row."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compression.codecs.base import Message
from torchtitan_lr.compression.sizes import kept_entries, verdict_block

F = TypeVar("F", bound=Callable[..., Any])


def fused(function: F) -> F:
    """Compile an element-wise function to one kernel for accelerators, not for a CPU.

    Args:
        function: Its first argument is a tensor; of Python values it takes integers only.
    """
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
    """Return positions and values of the largest entries by magnitude, in no order.

    Each row has exactly ``kept_entries(m, theta)`` entries, so that it reaches θ; the published
    threshold, estimated from a sample, does not. A NaN counts as the largest and is sent.

    Args:
        rows: (W, m).
        theta: Share of unsent entries.

    Returns:
        Positions (W, k), int64, and values (W, k).
    """
    m = rows.shape[1]
    k = kept_entries(m, theta)
    if k == m:
        return torch.arange(m, device=rows.device).expand(rows.shape), rows.clone()
    positions = rows.abs().topk(k, dim=1, sorted=False).indices
    return positions, rows.gather(1, positions)


def left_over(rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
    """Return a rank's residual: rows without what it sent; failed blocks count as unsent.

    Args:
        rows: Those that were encoded (W, m); overwritten.
        message: What was sent of them.
        verdicts: The owners' packed verdicts (W, v), see `Decoded`; None if none can fail.
    """
    if verdicts is None:
        return rows.scatter_(1, message.positions, 0)
    failed = unpack(verdicts, verdicts.shape[1] * 8)
    failed = failed.gather(1, message.positions // verdict_block(rows.shape[1]))
    return rows.scatter_(1, message.positions, torch.where(failed, message.values, 0))
