# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears of one input, grouped, have the gradients of separate ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.models.linears import down_products

SHAPES = ((2, 5, 12), (4, 12), (4, 12), (3, 12))
"""Of an input and its group's weights."""


def joined(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat(down_products(x, weights), -1)


def plain(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([F.linear(x, weight) for weight in weights], -1)


def shifted(x: Tensor, *weights: Tensor) -> Tensor:
    """The control: each output has its neighbour's place."""
    return plain(x, weights[1], weights[0], *weights[2:])


def results(function: Any, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in SHAPES]
    # Used twice, as the residual stream is.
    out = function(leaves[0] * 1.5, *leaves[1:])
    scale = torch.arange(1, out.shape[-1] + 1, dtype=dtype)
    loss = (out.square() * scale).sum() + leaves[0].sin().sum()
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_separate_products(compiled: bool) -> None:
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        call: Any = joined
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(joined, backend="aot_eager", fullgraph=True)
        found = results(call, dtype)
        assert error(found, results(plain, dtype)) < limit
        assert error(found, results(shifted, dtype)) > 0.1
