# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which cells of a count sketch an entry falls into, and with which signs."""

import zlib

import torch
from torch import Tensor

from torchtitan_lr.analysis.compression import HASH_ROWS

_MASK = 0xFFFFFFFF


def step_seed(seed: int, unit: str, step: int) -> int:
    """Return a 32-bit seed for one exchange; entries that clash in one step part in the next.

    Args:
        seed: Of the run.
        unit: Name of what is exchanged.
        step: Number of the exchange.
    """
    return zlib.crc32(f"{seed}/{unit}/{step}".encode())


def cells_and_signs(positions: Tensor, row: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hash entries into the rows of a sketch.

    Args:
        positions: Entries (...), int64, below 2³².
        row: Cells of one row.
        seed: Of the step.

    Returns:
        Cells (3, ...), int64, row r within [r·row, (r + 1)·row), and whether the sign is negative
        (3, ...), bool.
    """
    hashed = torch.stack([_mix(positions, seed, r) for r in range(HASH_ROWS)])
    shape = (HASH_ROWS, *[1] * positions.dim())
    starts = torch.arange(HASH_ROWS, device=positions.device).view(shape) * row
    # The high bits choose the cell without a division; the lowest one is left for the sign.
    return ((hashed * row) >> 32) + starts, (hashed & 1).bool()


def _mix(x: Tensor, seed: int, row: int) -> Tensor:
    """Scramble 32-bit integers: multiply and shift, twice (MurmurHash3's finalizer)."""
    salt = zlib.crc32(f"{seed}:{row}".encode())
    x = (x * 0x9E3779B1 + salt) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
