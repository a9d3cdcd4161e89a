# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BOOST's deferred norm and grouped products on one device, for a comparison of times.

With rstd = (|x|² / d + ε)^(-1/2) per token, A (x · rstd ⊙ γ) = rstd · (A ⊙ γ) x: the product reads
the stream itself, and what is normalized is r wide. Backward then has no pass for γ over the
stream: the gradient of A ⊙ γ is one product, and γ's is a sum over its r rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.models.linears import Down, LowRankGroup, LowRankLinear, Up, concatenated
from torchtitan_lr.parallel.btp import UpEdge, norm_numbers, sum_of_squares


class _DeferredDown(torch.autograd.Function):
    """Forward rstd · (A ⊙ γ) x of all linears of a group, backward two products."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, gamma, eps, *weights = inputs  # (b, s, d), (d,); A (r_i, d)
        rstd = torch.rsqrt(sum_of_squares(x) / x.shape[-1] + eps).unsqueeze(-1)  # (b, s, 1)
        y = (F.linear(x, concatenated(weights) * gamma) * rstd).to(x.dtype)  # (b, s, Σ r_i)
        ctx.save_for_backward(x, gamma, rstd, y, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gamma, rstd, y, *weights = ctx.saved_tensors
        A = concatenated(weights)  # (Σ r_i, d)
        # rstd depends on x by -rstd³ / d · x, and y = P rstd: <dy, P> = <dy, y> / rstd.
        inner = (dy * y.to(rstd.dtype)).sum(-1, keepdim=True)
        dp = (dy * rstd).to(x.dtype)
        dx = dp @ (A * gamma) - rstd.square() / x.shape[-1] * inner * x
        dfolded = dp.flatten(0, 1).T @ x.flatten(0, 1)  # (Σ r_i, d)
        dgamma = (dfolded.to(rstd.dtype) * A).sum(0)
        dweights = (dfolded * gamma).split([weight.shape[0] for weight in weights])
        return (dx.to(x.dtype), dgamma.to(gamma.dtype), None, *dweights)


class DeferredDown(nn.Module):
    """A of the normalized stream; takes the place of `Down` where there is a norm."""

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.RMSNorm
    ) -> list[Tensor]:
        """Return one latent (b, s, r) per linear of the stream x (b, s, d)."""
        gamma, _, eps = norm_numbers(norm)
        weights = [linear.A.weight for linear in linears]
        y: Tensor = _DeferredDown.apply(x, gamma, eps, *weights)
        return list(y.split([weight.shape[0] for weight in weights], dim=-1))


def defer_norms(block: nn.Module) -> None:
    """Defer the norms of a block of one device, in place."""
    for name in ("attention.qkv", "feed_forward.gate_up"):
        group = block.get_submodule(name)
        assert isinstance(group, LowRankGroup) and isinstance(group.down, Down)
        group.down = DeferredDown()


def group_products(block: nn.Module, alone: Ranks) -> None:
    """Defer the norms, and let linears of equal shape share one product of B, in place.

    Args:
        block: The block.
        alone: This rank, in a group without others.
    """
    defer_norms(block)
    for name in ("attention.qkv", "feed_forward.gate_up"):
        group = block.get_submodule(name)
        assert isinstance(group, LowRankGroup) and isinstance(group.up, Up)
        group.up = UpEdge(alone)
