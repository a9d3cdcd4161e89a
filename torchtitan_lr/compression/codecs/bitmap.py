# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Indices of sent entries with one bit per entry."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compression.codecs.compiled import fused


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
    whole = packed[0].clone()
    for row in packed[1:]:
        whole |= row
    return whole


def mark(positions: Tensor, m: int, marked: Tensor | None = None) -> Tensor:
    """Return a mask (W, m) with the given entries (W, k) set.

    Args:
        positions: Distinct entries of each row.
        m: Entries of a row.
        marked: Which of the positions to set (W, k); all by default.
    """
    mask = torch.zeros(positions.shape[0], m, dtype=torch.bool, device=positions.device)
    if marked is None:
        marked = torch.ones_like(positions, dtype=torch.bool)
    return mask.scatter_(1, positions, marked)
