# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Hash functions of the count sketch: an entry's cells and signs."""

import zlib

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.compiled import fused

_MASK = 0xFFFFFFFF


def step_seed(seed: int, unit: str, step: int) -> int:
    """Return a 32-bit seed for one exchange, so that collisions differ between steps."""
    return zlib.crc32(f"{seed}/{unit}/{step}".encode())


def cells_and_signs(positions: Tensor, row: int, seed: int) -> tuple[Tensor, Tensor]:
    """Hash entries into the rows of a sketch.

    Args:
        positions: Entries (...), int64, below 2³².
        row: Cells of one row.
        seed: Seed of the step.

    Returns:
        Cells (3, ...), int64, row r within [r·row, (r + 1)·row), and whether the sign is negative
        (3, ...), bool.
    """
    salts = [zlib.crc32(f"{seed}:{r}".encode()) for r in range(3)]
    return _hash_rows(positions, row, *salts)


@fused
def _hash_rows(x: Tensor, row: int, salt_0: int, salt_1: int, salt_2: int) -> tuple[Tensor, Tensor]:
    mixed = [_mix(x, salt) for salt in (salt_0, salt_1, salt_2)]
    # The high bits choose the cell without a division; the lowest bit is the sign.
    cells = torch.stack([((h * row) >> 32) + r * row for r, h in enumerate(mixed)])
    return cells, torch.stack([(h & 1).bool() for h in mixed])


def _mix(x: Tensor, salt: int) -> Tensor:
    """Scramble 32-bit integers: multiply and shift, twice (MurmurHash3's finalizer)."""
    x = (x * 0x9E3779B1 + salt) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
