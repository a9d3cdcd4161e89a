# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Buffers in large pages.

A decoding step reads all its weights and the whole cache once. With pages of 4 KiB, which are the
default where the kernel gives large ones on request only, a core then waits for addresses: it reads
18 GB/s instead of 25 on the AMD machine of ``docs/results/cola_t11.md``.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_PAGE = 2 << 20
"""Bytes of a large page."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in the CPU's memory, in large pages if they fill half of one.

    Systems without large pages give small ones.

    Args:
        shape: Any shape.
        dtype: Any type.
    """
    size = prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if 2 * size < _PAGE or advice is None:
        return torch.zeros(*shape, dtype=dtype)
    size += -size % _PAGE
    # Private: the kernel has other rules for shared memory.
    whole = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(whole, dtype=torch.uint8).data_ptr() % _PAGE
    with suppress(OSError):  # a kernel without large pages: the small ones are zeros too
        whole.madvise(advice, start, size)
    return torch.frombuffer(whole, dtype=dtype, count=prod(shape), offset=start).view(*shape)


def new_zeros(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros of the type and on the device of ``tensor``, on a CPU as `zeros` gives them."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return tensor.new_zeros(*shape)
    return zeros(shape, tensor.dtype)
