# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""RMSNorm of a residual stream that is sharded along its features.

The rms of a token needs the features of all ranks. `sync_norm` reduces it before it normalizes.
`online_down` (BOOST's online RMSNorm, in the deferred form) multiplies first and normalizes the
r-wide product afterwards, so that statistic and product are reduced at the same time:

    H = Σ_i (x_i ⊙ γ_i) A_iᵀ,   S = Σ_i |x_i|²,   rstd = (S / d + ε)^(-1/2),   Y = H · rstd

with i over the ranks. ε enters once, in the global rms. Backward communicates nothing for the
statistic: Y and its gradient are the same on every rank, and so is
dS = -½ · rstd² / d · <dY, Y>. Only with token shards of Y (`sequence`) is dS gathered.

γ is folded into A: (x ⊙ γ) Aᵀ = x (A ⊙ γ)ᵀ, where A has r rows and x has b·s, and the gradients of
both factors come from one product, d(A ⊙ γ) = dHᵀ x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.models.marks import save
from torchtitan_lr.parallel.tensor.collectives import (
    TOKENS,
    Ranks,
    cast,
    finish_all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from torchtitan_lr.parallel.tensor.grouped_linear import summed_products

COLUMN_MULTIPLE = 8
"""A message with the statistic as a column is padded to a multiple of this width, so that the
rows of the tensor are aligned to 16 bytes in half precision."""


@dataclass(frozen=True)
class OnlineNorm:
    """The settings of `online_down` for one norm.

    Args:
        ranks: The ranks that share the features.
        dim: Features d over all ranks.
        eps: ε, added to the mean square.
        grouped: Whether the linears' products are one message or one message each.
        column: Whether the statistic is a column of the (first) message, in its dtype. Otherwise
            it has its own all-reduce in fp32, which starts before the product.
        sequence: Whether each rank keeps only its shard of the tokens.
    """

    ranks: Ranks
    dim: int
    eps: float
    grouped: bool = True
    column: bool = False
    sequence: bool = False


class _OnlineDown(torch.autograd.Function):
    """Forward: one reduction per message and one of the statistic. Backward: see the module."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: see `grouped_linear`.
        x, gamma, norm, *weights = inputs

        def reduced() -> tuple[Tensor, ...]:
            statistic = sum_of_squares(x)
            started = None if norm.column else _start_reduce(statistic, norm)
            reductions = []
            for i, group in enumerate(_payload_weights(norm, weights)):
                h = F.linear(x, torch.cat(group) * gamma)
                payload = _append_column(h, statistic) if norm.column and i == 0 else h
                reductions.append(_start_reduce(payload, norm))  # runs during the next product
            products = [wait(reduction) for reduction in reductions]
            if started is None:
                width = sum(w.shape[0] for w in _payload_weights(norm, weights)[0])
                statistic = products[0][..., width].to(statistic.dtype)
                products[0] = products[0][..., :width]
            else:
                statistic = wait(started)
            rstd = torch.rsqrt(statistic / norm.dim + norm.eps)
            return (rstd, *(cast(h * rstd.unsqueeze(-1), x.dtype) for h in products))

        rstd, *ys = save(reduced)
        ctx.save_for_backward(x, gamma, rstd, *ys, *weights)
        ctx.norm, ctx.n_payloads = norm, len(ys)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, gamma, rstd, *rest = ctx.saved_tensors
        norm, ys, weights = ctx.norm, rest[: ctx.n_payloads], rest[ctx.n_payloads :]
        inner = sum((dy * y.to(rstd.dtype)).sum(-1) for dy, y in zip(dys, ys, strict=True))
        ds = -0.5 / norm.dim * rstd.square() * inner  # equal on every rank
        dhs = [(dy * rstd.unsqueeze(-1)).to(x.dtype) for dy in dys]
        if norm.sequence:
            # All gathers start before the first product.
            started = [start_all_gather(part, norm.ranks) for part in (ds, *dhs)]
            ds, *dhs = (finish_all_gather(part, norm.ranks, TOKENS) for part in started)
        dx = 2 * ds.unsqueeze(-1) * x
        dgamma = torch.zeros_like(gamma, dtype=rstd.dtype)
        dweights: list[Tensor] = []
        for dh, group in zip(dhs, _payload_weights(norm, weights), strict=True):
            dx = dx + summed_products(dh, [weight * gamma for weight in group])
            dfolded = dh.flatten(0, 1).T @ x.flatten(0, 1)
            parts = dfolded.split([weight.shape[0] for weight in group])
            for part, weight in zip(parts, group, strict=True):
                dgamma = dgamma + (part.to(rstd.dtype) * weight).sum(0)
            dweights.extend(part * gamma for part in parts)
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, *dweights


class _SummedDown(torch.autograd.Function):
    """Forward: one reduction per message. Backward: nothing, or gathers of token shards."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        x, norm, *weights = inputs
        ctx.save_for_backward(x, *weights)
        ctx.norm = norm

        def reduced() -> tuple[Tensor, ...]:
            products = (F.linear(x, torch.cat(w)) for w in _payload_weights(norm, weights))
            started = [_start_reduce(h, norm) for h in products]
            return tuple(wait(reduction) for reduction in started)

        return save(reduced)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        if ctx.norm.sequence:
            started = [start_all_gather(gradient, ctx.norm.ranks) for gradient in gradients]
            gradients = tuple(finish_all_gather(g, ctx.norm.ranks, TOKENS) for g in started)
        gradient = torch.cat(gradients, -1) if len(gradients) > 1 else gradients[0]
        dw = gradient.flatten(0, 1).T @ x.flatten(0, 1)
        dx = summed_products(gradient, weights)
        return (dx, None, *dw.split([weight.shape[0] for weight in weights]))


class _SyncNorm(torch.autograd.Function):
    """Forward all-reduce of the statistic, backward all-reduce of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:

        def reduced() -> tuple[Tensor]:
            statistic = wait(start_all_reduce(sum_of_squares(x), ranks))
            return (torch.rsqrt(statistic / dim + eps),)

        rstd = save(reduced)[0].unsqueeze(-1)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.dim, ctx.ranks = dim, ranks
        return cast(x * rstd * gamma, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        scaled = dy * gamma.to(rstd.dtype)
        inner = wait(start_all_reduce((scaled * x).sum(-1), ctx.ranks)).unsqueeze(-1)
        dx = rstd * scaled - rstd.pow(3) / ctx.dim * inner * x
        dgamma = (dy * (x * rstd)).sum((0, 1))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None


def online_down(
    x: Tensor, gamma: Tensor, weights: Sequence[Tensor], norm: OnlineNorm
) -> list[Tensor]:
    """Project a sharded stream down and normalize the product (deferred RMSNorm).

    Args:
        x: Residual stream (b, s, d/T), Shard(-1).
        gamma: The norm's weight (d/T,), Shard(0).
        weights: A of every linear of the group, (r_i, d/T), Shard(1).
        norm: The settings of the reduction.

    Returns:
        One latent (b, s, r_i) per linear, replicated; (b, s/T, r_i), Shard(1), for `sequence`.
    """
    return _by_weight(_OnlineDown.apply(x, gamma, norm, *weights), weights)


def summed_down(x: Tensor, weights: Sequence[Tensor], norm: OnlineNorm) -> list[Tensor]:
    """Project a sharded input down and sum over the ranks; arguments as of `online_down`."""
    return _by_weight(_SummedDown.apply(x, norm, *weights), weights)


def sync_norm(x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:
    """Normalize a sharded stream after reducing its statistic.

    Args:
        x: Residual stream (b, s, d/T), Shard(-1).
        gamma: The norm's weight (d/T,), Shard(0).
        dim: Features d over all ranks.
        eps: ε, added to the mean square.
        ranks: The ranks that share the features.

    Returns:
        Normalized stream (b, s, d/T), Shard(-1).
    """
    out: Tensor = _SyncNorm.apply(x, gamma, dim, eps, ranks)
    return out


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum x² over the last dimension, accumulated and returned in fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square()


def _by_weight(payloads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    if len(payloads) == len(weights):
        return list(payloads)
    return list(payloads[0].split([weight.shape[0] for weight in weights], dim=-1))


def _payload_weights(norm: OnlineNorm, weights: Sequence[Tensor]) -> list[list[Tensor]]:
    return [list(weights)] if norm.grouped else [[weight] for weight in weights]


def _start_reduce(x: Tensor, norm: OnlineNorm) -> Tensor:
    if norm.sequence:
        return start_reduce_scatter(x, norm.ranks, TOKENS)
    return start_all_reduce(x, norm.ranks)


def _append_column(h: Tensor, statistic: Tensor) -> Tensor:
    padding = -(h.shape[-1] + 1) % COLUMN_MULTIPLE
    column = F.pad(statistic.to(h.dtype).unsqueeze(-1), (0, padding))
    return torch.cat((h, column), dim=-1)
