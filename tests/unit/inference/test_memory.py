# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Buffers in large pages."""

import mmap

import pytest
import torch

from torchtitan_lr.inference import memory
from torchtitan_lr.inference.memory import new_zeros, zeros

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


@linux_only
def test_new_pages_replace_free_ones_that_are_too_small(free):
    buffers = [zeros((PAGE,), torch.float32) for _ in range(4)]
    buffers.clear()
    assert len(free) == 4
    larger = [zeros((2, PAGE), torch.float32) for _ in range(3)]
    assert len(free) == 1 and not any(buffer.any() for buffer in larger)


@linux_only
def test_a_small_buffer_does_not_take_a_large_one_s_pages(free):
    large = zeros((32, PAGE), torch.float32)
    del large
    (pages,) = free
    small = zeros((PAGE // 4,), torch.float32)
    assert not free and not small.any()
    pages.close()  # raises where a buffer lies in them


@linux_only
def test_large_buffers_begin_with_a_large_page(free, monkeypatch):
    # New kernels align lengths of whole large pages by themselves.
    new, more = mmap.mmap, mmap.PAGESIZE
    monkeypatch.setattr(mmap, "mmap", lambda n, size, **options: new(n, size + more, **options))
    large = [zeros((PAGE // 4 + 1,), torch.float32) for _ in range(3)]
    assert all(buffer.data_ptr() % PAGE == 0 for buffer in large)
    small = [zeros((100,), torch.float32) for _ in range(3)]
    assert any(buffer.data_ptr() % PAGE for buffer in small)  # the control: chance aligns none


def test_other_devices_allocate_as_torch_does():
    like = torch.empty(2, device="meta", dtype=torch.float64)
    made = new_zeros(like, (1 << 10, 1 << 10))
    assert made.device.type == "meta" and made.dtype == torch.float64


def test_a_system_without_large_pages_gives_zeros(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros((2, PAGE), torch.float32).any()
