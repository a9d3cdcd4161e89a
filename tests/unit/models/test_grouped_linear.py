# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears of one input: one product for each kind of gradient, and the gradients of plain ones."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.concatenations import Concatenations
from tests.unit.tiny import build_tiny
from torchtitan_lr.models.grouped_linear import grouped_linears
from torchtitan_lr.models.layers import DownEdge, LowRankLinear
from torchtitan_lr.parallel.recompute.low_rank_checkpoint import apply_low_rank_checkpoint

SHAPES = ((2, 5, 12), (4, 12), (4, 12), (3, 12))
"""Of an input and its group's weights."""


class SeparateDownEdge(DownEdge):
    """One product per linear, by autograd: what the groups are compared with."""

    takes_gated = False

    def forward(  # type: ignore[override]
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        x = x if norm is None else norm(x)
        return [linear.A(x) for linear in linears]


def joined(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat(grouped_linears(x, weights), -1)


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


def test_steps_of_a_model_are_those_of_separate_products() -> None:
    """Loss, gradients and weights in fp64, with and without low-rank checkpointing."""
    for family in ("svd", "cola", "lax"):
        first = build_tiny(family, torch.float64)
        models = [first, copy.deepcopy(first), copy.deepcopy(first)]
        apply_low_rank_checkpoint(models[1], False)
        for module in models[2].modules():
            if type(module) is DownEdge:
                module.__class__ = SeparateDownEdge
        assert any(isinstance(module, SeparateDownEdge) for module in models[2].modules())
        names = [[*model.state_dict()] for model in models]
        assert names[2] == names[0]  # checkpoints know nothing of groups
        found = [_train(model) for model in models]
        for ours in found[:2]:
            assert error(ours, found[2]) < 1e-10


def _train(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    generator = torch.Generator().manual_seed(0)
    kept: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randint(64, (2, 16), generator=generator)).square().mean()
        loss.backward()
        kept += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*kept, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_groups_weights_are_put_side_by_side_once_per_step(checkpointed: bool) -> None:
    """Once for q, k, v and once for gate, up in each block; never at full rank or evaluation."""
    tokens = torch.arange(32).view(2, 16)
    for family, groups in (("cola", 2), ("lax", 2), ("full", 0)):
        model = build_tiny(family)
        if checkpointed and groups:
            apply_low_rank_checkpoint(model, False)
        weights = [weight for weight in model.parameters() if weight.dim() == 2]
        for _ in range(2):  # a checkpointed block's first pass is another
            with Concatenations(weights) as counted:
                loss = model(tokens).square().sum()
                assert counted.calls == 0
                loss.backward()
            assert counted.calls == groups * len(model.layers)
        with torch.no_grad(), Concatenations(weights) as counted:
            model(tokens)
        assert counted.calls == 0
    # The control: the count sees what it looks for.
    with Concatenations(weights) as counted:
        torch.cat(weights[1:3])
    assert counted.calls == 1
