# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weights in the order in which the step reads them, and its structures."""

import ctypes
from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.inference.memory import zeros

VECTOR_BYTES = 64
"""Bytes of the step's vectors; a panel has two of them per input channel."""

CODES = 16
"""Tokens of a panel of the screened head."""

TOGETHER = 4
"""Input channels side by side in it."""

_POINTERS, _NUMBERS, _FACTORS = 10, 10, 2


class Op(ctypes.Structure):
    """An operation: ``Op`` in ``step.cpp``."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("wait", ctypes.c_int64),
        ("turn", ctypes.c_int64),
        ("p", ctypes.c_void_p * _POINTERS),
        ("n", ctypes.c_int64 * _NUMBERS),
        ("f", ctypes.c_double * _FACTORS),
    ]


def panel_size(weight: Tensor) -> int:
    """Return the number NB of output channels of a panel."""
    return 2 * VECTOR_BYTES // weight.element_size()


def pack(weight: Tensor) -> Tensor:
    """Pack a weight (N, K) into panels [N / NB, K, NB] of NB output channels, zeros at the end."""
    size = panel_size(weight)
    padded = F.pad(weight.detach(), (0, 0, 0, -len(weight) % size))
    return padded.unflatten(0, (-1, size)).mT.contiguous()


def pack_together(weights: Sequence[Tensor]) -> list[Tensor]:
    """Pack weights of one type as `pack` does, one after the other in large pages."""
    size = panel_size(weights[0])
    shapes = [(-(-len(weight) // size), weight.shape[1], size) for weight in weights]
    sizes = [prod(shape) for shape in shapes]
    parts = zeros((sum(sizes),), weights[0].dtype).split(sizes)
    return [
        part.view(shape).copy_(pack(weight))
        for weight, part, shape in zip(weights, parts, shapes, strict=True)
    ]


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes (V, K) of eight bits, 128 added: [V / 16, K / 4, 16, 4].

    The last panel is filled with its last token, and K with zeros.
    """
    padded = torch.cat([codes, codes[-1:].expand(-len(codes) % CODES, -1)])
    padded = F.pad(padded, (0, -codes.shape[1] % TOGETHER))
    shifted = (padded.to(torch.int16) + 128).to(torch.uint8)
    parts = shifted.unflatten(1, (-1, TOGETHER)).unflatten(0, (-1, CODES))
    packed = parts.transpose(1, 2)
    return zeros(packed.shape, packed.dtype).copy_(packed)


def pack_bounds(*columns: Tensor) -> Tensor:
    """Pack numbers per token (V,) side by side per panel: [V / 16, columns, 16], fp32.

    The last panel is filled with its last token, which bounds itself.
    """
    rows = torch.stack([column.float() for column in columns])
    rows = torch.cat([rows, rows[:, -1:].expand(-1, -rows.shape[1] % CODES)], dim=1)
    return rows.unflatten(1, (-1, CODES)).transpose(0, 1).contiguous()
