# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""RMSNorm, and the row-parallel products behind it, of a stream that is sharded along its features.

The rms of a token needs the features of all ranks. `sync_norm` reduces it before it normalizes.
`online_down` (BOOST's online RMSNorm, in the deferred form) multiplies first and normalizes the
r-wide product afterwards, so that statistic and product are reduced at the same time:

    H = Σ_i (x_i ⊙ γ_i) A_iᵀ,   S = Σ_i |x_i|²,   rstd = (S / d + ε)^(-1/2),   Y = H · rstd

with i over the ranks. ε enters once, in the global rms. Backward communicates nothing for the
statistic: Y and its gradient are the same on every rank, and so is
dS = -½ · rstd² / d · <dY, Y>. Only with token shards of Y (`sequence`) is dS gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import (
    FEATURES,
    SINGLE,
    TOKENS,
    Ranks,
    all_gather,
    cast,
    copy_to_ranks,
    local,
    reduce,
    save,
    start_sum,
    wait,
)


@dataclass(frozen=True)
class Reduction:
    """How the products of a group's down-projections are summed over the ranks.

    Args:
        ranks: The ranks that share the features; one rank sums nothing.
        grouped: Whether the linears' products are one message or one message each.
        sequence: Whether each rank keeps only its shard of the tokens.
    """

    # Without a default: torch 2.11 compiles no dataclass whose default is an object.
    ranks: Ranks
    grouped: bool = True
    sequence: bool = False

    def messages(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the weights whose products are one message, message by message."""
        return [list(weights)] if self.grouped else [[weight] for weight in weights]

    def by_weight(self, payloads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor per linear, of one per message."""
        if len(payloads) == len(weights):
            return list(payloads)
        return list(payloads[0].split([weight.shape[0] for weight in weights], dim=-1))


class _OnlineDown(torch.autograd.Function):
    """Forward: one reduction per message and one of the statistic. Backward: see the module."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: without gradients, the compiler compares numbers of arguments to
        # decide if a forward has a context, and is wrong for (ctx, x, *weights) with two weights.
        x, gamma, dim, eps, how, *weights = inputs

        products: list[Tensor] = []
        kept = TOKENS if how.sequence else None

        def reduced() -> tuple[Tensor]:
            start = partial(start_sum, ranks=how.ranks, dim=kept, owned=True)
            statistic = start(sum_of_squares(x))
            reductions = []
            for group in how.messages(weights):
                # (x ⊙ γ) Aᵀ = x (A ⊙ γ)ᵀ: A has r rows, and x has b·s.
                rows = concatenated(group) * gamma
                # No name for the product itself: it would outlive the reduction, which runs during
                # the next product.
                reductions.append(start(F.linear(x, rows)))
            products.extend(wait(reduction) for reduction in reductions)
            return (torch.rsqrt(wait(statistic) / dim + eps),)

        (rstd,) = save(reduced)
        # From the saved statistic: else a compiled backward reduces it again.
        ys = save(lambda: tuple(cast(h * rstd.unsqueeze(-1), x.dtype) for h in products))
        ctx.save_for_backward(x, gamma, rstd, *ys, *weights)
        ctx.dim, ctx.how, ctx.n_payloads = dim, how, len(ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, gamma, rstd, *rest = ctx.saved_tensors
        how, ys, weights = ctx.how, rest[: ctx.n_payloads], rest[ctx.n_payloads :]
        inner = sum((dy * y.to(rstd.dtype)).sum(-1) for dy, y in zip(dys, ys, strict=True))
        ds = -0.5 / ctx.dim * rstd.square() * inner  # equal on every rank
        dhs = [(dy * rstd.unsqueeze(-1)).to(x.dtype) for dy in dys]
        if how.sequence:
            ds, *dhs = all_gather([ds, *dhs], how.ranks, TOKENS)
        dx = 2 * ds.unsqueeze(-1) * x
        dgamma = torch.zeros_like(gamma, dtype=rstd.dtype)
        dweights: list[Tensor] = []
        for dh, group in zip(dhs, how.messages(weights), strict=True):
            dx = dx + summed_products(dh, [weight * gamma for weight in group])
            # d(A ⊙ γ) = dHᵀ x: the gradients of both factors come from one product.
            dfolded = dh.flatten(0, 1).T @ x.flatten(0, 1)
            parts = dfolded.split([weight.shape[0] for weight in group])
            for part, weight in zip(parts, group, strict=True):
                dgamma = dgamma + (part.to(rstd.dtype) * weight).sum(0)
            dweights.extend(part * gamma for part in parts)
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None, *dweights


class _Down(torch.autograd.Function):
    """Forward: one reduction per message. Backward: nothing, or gathers of token shards."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: see `_OnlineDown`.
        x, how, *weights = inputs
        # The weights themselves, not what is put side by side: a copy per block would survive when
        # FSDP frees the gathered weights.
        ctx.save_for_backward(x, *weights)
        ctx.how = how
        if how.ranks.size == 1:
            return save(lambda: tuple(F.linear(x, weight) for weight in weights))

        kept = TOKENS if how.sequence else None
        start = partial(start_sum, ranks=how.ranks, dim=kept, owned=True)
        # The inner list starts all reductions: each runs during the next product.
        return save(
            lambda: tuple(
                wait(reduction)
                for reduction in [
                    start(F.linear(x, concatenated(group))) for group in how.messages(weights)
                ]
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        how, whole = ctx.how, list(gradients)
        if how.sequence:
            whole = all_gather(gradients, how.ranks, TOKENS)
        gradient = concatenated(whole, dim=-1)
        dw = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        if how.ranks.size == 1:
            dx = gradient @ concatenated(weights)
        else:
            dx = summed_products(gradient, weights)
        return (dx, None, *dw.split([weight.shape[0] for weight in weights]))


class _SyncNorm(torch.autograd.Function):
    """Forward all-reduce of the statistic, backward all-reduce of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:
        total = partial(reduce, ranks=ranks, owned=True)
        (rstd,) = save(lambda: (torch.rsqrt(total(sum_of_squares(x)) / dim + eps),))
        rstd = rstd.unsqueeze(-1)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.dim, ctx.ranks = dim, ranks
        return cast(x * rstd * gamma, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        scaled = dy * gamma.to(rstd.dtype)
        inner = reduce((scaled * x).sum(-1), ctx.ranks, owned=True).unsqueeze(-1)
        dx = rstd * scaled - rstd.pow(3) / ctx.dim * inner * x
        dgamma = (dy * (x * rstd)).sum((0, 1))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None


class _ScatteredNorm(torch.autograd.Function):
    """Forward all-gather and statistic's all-reduce, backward reduce-scatter and all-reduce.

    H = U · rstd with U the gathered γ ⊙ x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:
        started = start_sum(sum_of_squares(x), ranks, owned=True)
        (gathered,) = all_gather([x * gamma], ranks, FEATURES)
        rstd = torch.rsqrt(wait(started) / dim + eps).unsqueeze(-1)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.dim, ctx.ranks = dim, ranks
        return cast(gathered * rstd, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        dgathered = (gradient * rstd).to(x.dtype)
        du = reduce(dgathered, ctx.ranks, FEATURES).to(rstd.dtype)
        # dS = -½ rstd² / d · <dH, H>, and <dH, H> = <dU, U> is a sum over the features, of which
        # a rank has its own.
        inner = reduce((du * (x * gamma)).sum(-1), ctx.ranks, owned=True).unsqueeze(-1)
        ds = -0.5 / ctx.dim * rstd.square() * inner
        dx = du * gamma + 2 * ds * x
        dgamma = (du * x).sum((0, 1))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None


def down_products(
    x: Tensor, weights: Sequence[Tensor], how: Reduction = Reduction(SINGLE)
) -> list[Tensor]:
    """Apply the down-projections of a group to one input, with one product per kind of gradient.

    Args:
        x: Input (b, s, d_in/T), Shard(-1).
        weights: A of every linear of the group, (r_i, d_in/T), Shard(1).
        how: How the products are summed.

    Returns:
        One latent (b, s, r_i) per linear, replicated; (b, s/T, r_i), Shard(1), for `sequence`.
        Low-rank checkpointing saves them.
    """
    return how.by_weight(_Down.apply(x, how, *weights), weights)


def online_down(
    x: Tensor, gamma: Tensor, dim: int, eps: float, weights: Sequence[Tensor], how: Reduction
) -> list[Tensor]:
    """Project a sharded stream down and normalize the product (deferred RMSNorm).

    The arguments are those of `sync_norm` and `down_products`, the result is that of the latter.
    """
    return how.by_weight(_OnlineDown.apply(x, gamma, dim, eps, how, *weights), weights)


def sync_norm(
    x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks, gather: bool = False
) -> Tensor:
    """Normalize a sharded stream after reducing its statistic.

    Args:
        x: Residual stream (b, s, d/T), Shard(-1).
        gamma: The norm's weight (d/T,), Shard(0).
        dim: Features d over all ranks.
        eps: ε, added to the mean square.
        ranks: The ranks that share the features.
        gather: Whether to gather the result, for vocabulary shards.

    Returns:
        Normalized stream (b, s, d/T), Shard(-1); gathered (b, s, d), replicated, whose gradient is
        summed over the ranks.
    """
    kind = _ScatteredNorm if gather else _SyncNorm
    out: Tensor = kind.apply(x, gamma, dim, eps, ranks)
    return out


def normalize(x: Tensor, norm: nn.RMSNorm, ranks: Ranks = SINGLE) -> Tensor:
    """Normalize whole features (..., d) with a replicated weight (d,).

    Args:
        x: The stream.
        norm: The norm.
        ranks: The ranks whose streams differ (token shards, lanes): the weight's gradient is
            summed over them.
    """
    # The gradient of the kernel is that of this rank's stream only.
    weight = copy_to_ranks(local(norm.weight), ranks)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


def norm_numbers(norm: nn.RMSNorm) -> tuple[Tensor, int, float]:
    """Return a norm's weight on this rank, its features d over all ranks, and its ε."""
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    return local(norm.weight), norm.normalized_shape[0], eps


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum x² over the last dimension, accumulated and returned in fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square()


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along a dimension; one alone is returned as it is, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def summed_products(gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the input of concatenated linears, without concatenating weights.

    Args:
        gradient: Of the concatenated outputs, (b, s, Σ d_out_i).
        weights: One (d_out_i, d_in) per linear.

    Returns:
        Tensor (b, s, d_in); each sum over a linear's outputs is added, in turn, in its dtype.
    """
    sizes = [weight.shape[0] for weight in weights]
    parts = gradient.flatten(0, 1).split(sizes, dim=-1)
    total = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        if torch.compiler.is_compiling():
            total = total + part @ weight  # the compiler fuses sums, and copies for an addmm
        else:
            torch.addmm(total, part, weight, out=total)
    return total.unflatten(0, gradient.shape[:2])
