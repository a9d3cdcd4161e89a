# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Indices of sent entries with one or four bits per entry."""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_lr.compression.codecs.compiled import fused


def pack(mask: Tensor, bits: int = 1) -> Tensor:
    """Pack truth values, the first one into the lowest bits of the first byte.

    Args:
        mask: (..., m), bool.
        bits: Width of an entry: 1 or 4.

    Returns:
        (..., ⌈m·bits/8⌉), uint8.
    """
    return cast(Tensor, _pack(mask, bits))


@fused
def _pack(mask: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    padded = pad(mask.to(torch.uint8), (0, -mask.shape[-1] % per_byte))
    fields = padded.unflatten(-1, (-1, per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=mask.device)
    # The fields do not overlap: their sum is their OR, and stays below 256.
    return (fields << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, m: int, bits: int = 1) -> Tensor:
    """Return a mask of the marked entries, whose field is not zero.

    Args:
        packed: (..., ⌈m·bits/8⌉), uint8.
        m: Entries.
        bits: Width of an entry: 1 or 4.

    Returns:
        (..., m), bool.
    """
    return cast(Tensor, _unpack(packed, m, bits))


@fused
def _unpack(packed: Tensor, m: int, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    fields = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
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
