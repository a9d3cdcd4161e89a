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
from torchtitan_lr.models.linears import LowRankLinear, activated, concatenated
from torchtitan_lr.models.one_device import Group, OneDevice
from torchtitan_lr.parallel.btp import norm_numbers, sum_of_squares, up_projections


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


class Deferred(OneDevice):
    """Applies A of the normalized stream so, where there is a norm."""

    def down(
        self, group: Group, x: Any, linears: Sequence[LowRankLinear], norm: Any
    ) -> list[Tensor]:
        """Return one latent (b, s, r) per linear of the stream x (b, s, d)."""
        if norm is None:
            return super().down(group, x, linears, norm)
        gamma, _, eps = norm_numbers(norm)
        weights = [linear.A.weight for linear in linears]
        y: Tensor = _DeferredDown.apply(x, gamma, eps, *weights)
        return list(y.split([weight.shape[0] for weight in weights], dim=-1))


class Grouped(Deferred):
    """Lets linears of equal shape share one product of B too, where there is a norm."""

    def __init__(self, alone: Ranks) -> None:
        self.alone = alone  # this rank, in a group without others

    def up(
        self, group: Group, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]
    ) -> list[Tensor]:
        """Return one output B σ(h) (b, s, d_out) per linear."""
        if not group.opens:
            return super().up(group, latents, linears)
        weights = [linear.B.weight for linear in linears]
        return up_projections(activated(latents, group.use_silu), weights, self.alone)


def defer_norms(block: nn.Module) -> None:
    """Defer the norms of a block of one device, in place."""
    Deferred().take_over(block)


def group_products(block: nn.Module, alone: Ranks) -> None:
    """Defer the norms, and let linears of equal shape share one product of B, in place."""
    Grouped(alone).take_over(block)
