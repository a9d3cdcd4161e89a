# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Buffers in large pages."""

import mmap

import pytest
import torch

from torchtitan_lr.inference import memory
from torchtitan_lr.inference.memory import zeros

PAGE = 2 << 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
def test_zeros_are_writable_and_their_own(dtype):
    shape = (3, PAGE // 2 // dtype.itemsize + 5)
    first, second = zeros(shape, dtype), zeros(shape, dtype)
    assert first.shape == shape and first.dtype == dtype and first.is_contiguous()
    assert not first.any()
    first.fill_(3)
    assert not second.any() and (first == 3).all()


linux_only = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")


@pytest.fixture
def free(monkeypatch):
    """The pages whose buffers are gone; none at first."""
    pages: list[mmap.mmap] = []
    monkeypatch.setattr(memory, "_free", pages)
    return pages


@linux_only
def test_pages_are_used_again_when_the_last_view_is_gone(free):
    buffer = zeros((3, PAGE), torch.float32)
    place, view = buffer.data_ptr(), buffer.fill_(7)[1]
    del buffer
    other = zeros((3, PAGE), torch.float32)
    assert other.data_ptr() != place and (view == 7).all()
    del view
    smaller = zeros((PAGE // 2,), torch.float64)
    assert smaller.data_ptr() == place and not smaller.any() and not free


def test_a_system_without_large_pages_gives_zeros(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros((2, PAGE), torch.float32).any()
