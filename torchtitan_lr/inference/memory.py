# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Buffers in large pages, which are used again.

A decoding step reads all its weights and the whole cache once. With pages of 4 KiB, which are the
default where the kernel gives large ones on request only, a core then waits for addresses: it reads
18 GB/s instead of 25 on the AMD machine of ``docs/results/cola_t11.md``.

The pages of a new buffer are empty, and in a virtual machine the host may have to find each of
them: on the Intel machine of that page this took 0.4 of the 1.8 s in which a model of 130M read 32
prompts. The next batch's cache therefore gets the pages of the last one's.
"""

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_PAGE = 2 << 20
"""Bytes of a large page."""

_MOST = 8
"""Used pages may be that many times as large as a buffer: a cache does not hold a model's pages."""

_free: list[mmap.mmap] = []
"""Pages whose buffers are gone."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in the CPU's memory, in large pages if they fill half of one.

    Large pages outlive their buffer. The next buffer takes the smallest free ones that are large
    enough, and not far too large; else new pages replace free ones, so that their number does not
    grow. Systems without large pages give small ones.

    Args:
        shape: Any shape.
        dtype: Any type.
    """
    size = prod(shape) * dtype.itemsize
    if 2 * size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    size += -size % _PAGE + _PAGE  # one more: the kernel's pages need not begin with a large one
    _free.sort(key=len)
    fits = (i for i, pages in enumerate(_free) if size <= len(pages) <= _MOST * size)
    fitting = next(fits, None)
    pages = _new_pages(size) if fitting is None else _free.pop(fitting)
    buffer = (ctypes.c_byte * len(pages)).from_buffer(pages)
    weakref.finalize(buffer, _free.append, pages)
    start = -ctypes.addressof(buffer) % _PAGE
    found = torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=start).view(*shape)
    return found if fitting is None else found.zero_()


def _new_pages(size: int) -> mmap.mmap:
    del _free[-1:]
    # Private: the kernel has other rules for shared memory.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_byte.from_buffer(pages)) % _PAGE
    with suppress(OSError):  # a kernel without large pages: the small ones are zeros too
        pages.madvise(mmap.MADV_HUGEPAGE, start, (size - start) // _PAGE * _PAGE)
    return pages


def new_zeros(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros of the type and on the device of ``tensor``, on a CPU as `zeros` gives them."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return tensor.new_zeros(*shape)
    return zeros(shape, tensor.dtype)
