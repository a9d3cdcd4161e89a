# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Attention to a prefix as two calls, merged: its output and gradients are those of a mask."""

import pytest
import torch

from scripts.bench.split_attention import CPU, split_attention, with_repeated_heads
from torchtitan_lr.parallel.context import attend_to_prefix


def results(attention, dtype, queries, keys, heads=4, key_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, 16), *[(2, key_heads, keys, 16)] * 2)
    leaves = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    # Scores of very different sizes, so that one call may have all the weight.
    q, k, v = leaves
    out = attention(q * 4, k, v)
    upstream = torch.randn(out.shape, generator=generator).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def split(q, k, v):
    return split_attention(q, k, v, CPU)


def repeated(q, k, v):
    return split_attention(q, k, v, with_repeated_heads(CPU))


def unmerged(q, k, v):
    """The control: the mean of both outputs."""
    n = q.shape[-2]
    own, before = (
        split(q, k[:, :, -n:], v[:, :, -n:]),
        CPU.forward(q, k[:, :, :-n], v[:, :, :-n], False),
    )
    return (own + before[0]) / 2


@pytest.mark.parametrize("attention", [split, repeated])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 3e-15), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (8, 40), (5, 6), (33, 100)])
def test_it_is_attention_with_a_mask(attention, dtype, limit, queries, keys):
    exact = results(attend_to_prefix, torch.float64, queries, keys)
    found = results(attention, dtype, queries, keys)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == dtype
        # fp32 rounds the inputs of neither: the same numbers, exact in both.
        assert (a.double() - b).norm() / b.norm() < limit


def test_the_control_is_seen():
    exact = results(attend_to_prefix, torch.float64, 8, 40)[0]
    found = results(unmerged, torch.float64, 8, 40)[0]
    assert (found - exact).norm() / exact.norm() > 0.1
