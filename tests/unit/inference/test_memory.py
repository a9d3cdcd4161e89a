# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Buffers in large pages."""

import mmap

import pytest
import torch

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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_large_buffers_begin_with_a_large_page():
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
