# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Grouped linears of the plans on one rank (T = 1): gradients, and concatenations per step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.concatenations import Concatenations
from torchtitan_lr.parallel.tensor.collectives import Ranks
from torchtitan_lr.parallel.tensor.grouped_linear import concatenated_linear
from torchtitan_lr.parallel.tensor.online_norm import OnlineNorm, online_down
from torchtitan_lr.parallel.tensor.shared_linear import SharedInput, shared_linear, shared_linears

B, S, D, R = 2, 3, 8, 5


def shared(ranks: Ranks, x: Tensor, gamma: Tensor, *weights: Tensor) -> list[Tensor]:
    return [shared_linear(x * gamma, weights, SharedInput(ranks))]


def concatenated(ranks: Ranks, x: Tensor, gamma: Tensor, *weights: Tensor) -> list[Tensor]:
    return [concatenated_linear(x * gamma, weights)]


def separate(ranks: Ranks, x: Tensor, gamma: Tensor, *weights: Tensor) -> list[Tensor]:
    inputs = torch.cat([x * (i + 1) for i in range(len(weights))], -1)
    return shared_linears(inputs, weights, SharedInput(ranks, separate=True))


def online(ranks: Ranks, x: Tensor, gamma: Tensor, *weights: Tensor) -> list[Tensor]:
    return online_down(x, gamma, weights, OnlineNorm(ranks, D, 0.1))


def plain(name: str, x: Tensor, gamma: Tensor, *weights: Tensor) -> list[Tensor]:
    """The same by autograd, one product per weight."""
    if name == "separate":
        return [F.linear(x * (i + 1), weight) for i, weight in enumerate(weights)]
    if name == "online":
        x = x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt()
    return [F.linear(x * gamma, weight) for weight in weights]


def results(function: Callable[..., list[Tensor]], *first: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, D), (D,), (R + 2, D), (R, D), (R, D))  # q is wider than k and v
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = torch.cat(function(*first, *leaves), -1)
    loss = (out.square() * torch.arange(1, out.shape[-1] + 1)).sum() + leaves[1].sum()
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("function", [concatenated, shared, separate, online])
def test_weights_are_concatenated_once(function: Callable[..., list[Tensor]], alone: Ranks) -> None:
    weights = [torch.empty(R + 2, D), torch.empty(R, D)]
    with Concatenations(weights) as counted:
        found = results(function, alone)
    assert counted.calls == 1
    expected = results(plain, function.__name__)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-13 * b.abs().max()
