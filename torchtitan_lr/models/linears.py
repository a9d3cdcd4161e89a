# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank and dense linears, and the edges that apply them on one or several ranks.

A factorised block is a chain of chunks: an up-projection B, d- or f-wide operations, the next
down-projection A. The activations between chunks are r-wide, so ranks communicate there. The
borders are the *edges* below: modules without parameters that receive the linears they apply and
work on a whole group (q, k, v; gate, up). With several ranks they are those of bottleneck-aware
tensor parallelism (BOOST), or at full rank of Megatron-LM; another plan replaces them by name, and
the block's code does not change.

Two products recompute their elementwise input in backward. A product keeps its input for the
gradient of its weight, which is waste where that input is a function of tensors that backward needs
anyway: σ(h) beside h, and silu(gate) · up beside gate and up. Memory falls by r for every
bottleneck with σ but a block's last, and by 2 f for every SwiGLU, per token, for one more
elementwise pass each. In compiled blocks the compiler decides what is kept (`compat.compiler`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_lr.collectives import (
    SINGLE,
    TOKENS,
    Edge,
    Ranks,
    all_gather,
    copy_to_ranks,
    end_recomputation,
    local,
    reduce_over_ranks,
    save,
    scatter_sum,
    start_sum,
    wait,
)
from torchtitan_lr.models.norms import (
    Reduction,
    concatenated,
    down_products,
    norm_numbers,
    normalize,
    online_down,
    summed_products,
    sync_norm,
)


class LowRankLinear(nn.Module):
    """The factors of one linear map, W ≈ B A; applied by the edges, not by a call.

    Args:
        d_in: Input width; A.weight is (r, d_in).
        d_out: Output width; B.weight is (d_out, r).
        rank: Rank r.
        gated: Whether to hold a learned factor on the latent carried from the previous block.
    """

    def __init__(self, d_in: int, d_out: int, rank: int, gated: bool = False) -> None:
        super().__init__()
        self.A = nn.Linear(d_in, rank, bias=False)
        self.B = nn.Linear(rank, d_out, bias=False)
        # Shape (1,), because FSDP2 shards along dimension 0 and does not support scalars.
        self.gate = nn.Parameter(self.A.weight.new_ones(1)) if gated else None


class Gated(NamedTuple):
    """The input σ(gate) · up of a product, not computed yet."""

    gate: Tensor
    """(b, s, f), or a latent (b, s, r)."""

    up: Tensor | None
    """(b, s, f); None for σ(gate) alone."""

    silu: bool
    """Whether σ is SiLU; otherwise it is the identity."""

    def product(self) -> Tensor:
        """Multiply."""
        active = F.silu(self.gate) if self.silu else self.gate
        return active if self.up is None else active * self.up


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, silu: bool, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        end_recomputation(gate, up, weight)
        ctx.silu = silu
        compute = lambda: (F.linear(Gated(gate, up, silu).product(), weight),)  # noqa: E731
        # Low-rank checkpointing repeats up-projections.
        (out,) = compute() if up is None else save(compute)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor]:
        gate, up, weight = ctx.saved_tensors
        active = F.silu(gate) if ctx.silu else gate
        dweight = gradient.flatten(0, -2).T @ (active if up is None else active * up).flatten(0, -2)
        dgate, dup = gradient @ weight, None
        if up is not None:
            dup = dgate * active
            dgate = dgate.mul_(up)  # in place: f-wide, and not needed any more
        if ctx.silu:
            dgate = torch.ops.aten.silu_backward(dgate, gate)
        return dgate, dup, None, dweight


def gated_linear(hidden: Gated, weight: Tensor) -> Tensor:
    """Apply A (σ(gate) · up), or B σ(h) to a latent h (CoLA, Eq. 3); keeps the factors alone.

    Returns:
        Tensor (b, s, r) for the weight A (r, f), or (b, s, d_out) for B (d_out, r).
    """
    out: Tensor = _GatedLinear.apply(*hidden, weight)
    return out


@dataclass(frozen=True)
class SharedInput:
    """How the input of column-parallel linears arrives.

    Args:
        ranks: The tensor-parallel ranks.
        dim: The sharded dimension, which forward gathers and backward reduce-scatters; None for a
            replicated input, whose gradient is all-reduced.
        saved: What low-rank checkpointing saves: the gathered ``input`` or the ``output``.
        separate: Whether each linear has its own part of the input's features. Otherwise all
            linears have the same input.
    """

    ranks: Ranks
    dim: int | None = None
    saved: Literal["input", "output"] = "output"
    separate: bool = False


class _SharedLinear(torch.autograd.Function):
    """Forward a gather of the input, if it is sharded; backward the sum of its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: see `norms`.
        x, shared, *weights = inputs
        whole = x
        if shared.dim is not None:
            gather = lambda: tuple(all_gather([x], shared.ranks, shared.dim))  # noqa: E731
            (whole,) = save(gather) if shared.saved == "input" else gather()
        ctx.save_for_backward(whole, *weights)
        end_recomputation(whole, *weights)
        ctx.shared = shared
        if shared.separate:
            return tuple(
                F.linear(part, run[0]) if len(run) == 1 else torch.bmm(part, torch.stack(run).mT)
                for part, run in _parts(whole, weights)
            )
        compute = lambda: (F.linear(whole, concatenated(weights)),)  # noqa: E731
        return save(compute) if shared.saved == "output" else compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        # Linears and collective are one Function for this: the reduction of the input's gradient
        # runs while the gradients of the weights are computed.
        whole, *weights = ctx.saved_tensors
        shared = ctx.shared
        # No name for the term itself: it would outlive the reduction.
        summed = start_sum(
            _input_gradient(gradients, weights).view_as(whole)
            if shared.separate
            else summed_products(gradients[0], weights),
            shared.ranks,
            shared.dim,
            owned=True,
        )
        dweights: list[Tensor] = []
        if not shared.separate:
            dw = gradients[0].flatten(0, 1).T @ whole.flatten(0, 1)
            dweights.extend(dw.split([weight.shape[0] for weight in weights]))
            return (wait(summed), None, *dweights)
        for gradient, (part, run) in zip(gradients, _parts(whole, weights), strict=True):
            if len(run) == 1:
                dweights.append(gradient.flatten(0, 1).T @ part.flatten(0, 1))
            else:
                dweights.extend(torch.bmm(gradient.mT, part).unbind())
        return (wait(summed), None, *dweights)


def _runs(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Put neighbours of equal shape together: each run is one batched product.

    Under grouped-query attention q has another shape and its own product; k and v share one.
    """
    return [list(run) for _, run in groupby(weights, key=lambda weight: weight.shape)]


def _parts(whole: Tensor, weights: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Pair each run of n weights with its input (b, s, r), or (n, b s, r) if n > 1."""
    runs = _runs(weights)
    parts = whole.split([len(run) * run[0].shape[1] for run in runs], dim=-1)
    return [
        # (b, s, n r) viewed as a batch: no copy, as `bmm` takes any strides
        (part.unflatten(-1, (len(run), -1)).flatten(0, 1).transpose(0, 1), run)
        if len(run) > 1
        else (part, run)
        for part, run in zip(parts, runs, strict=True)
    ]


def _input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient (b s, Σ r_i) of the inputs, from one gradient per run of weights."""
    by_weight: list[Tensor] = []
    for gradient, run in zip(gradients, _runs(weights), strict=True):
        by_weight += [gradient.flatten(0, 1)] if len(run) == 1 else gradient.unbind()
    pairs = list(zip(by_weight, weights, strict=True))
    if torch.compiler.is_compiling():
        return torch.cat([gradient @ weight for gradient, weight in pairs], -1)
    # Eagerly each product is written where it belongs: a `cat` would copy all of them once more.
    widths = [weight.shape[1] for weight in weights]
    out = by_weight[0].new_empty(by_weight[0].shape[0], sum(widths))
    for (gradient, weight), part in zip(pairs, out.split(widths, dim=-1), strict=True):
        torch.mm(gradient, weight, out=part)
    return out


def shared_linears(x: Tensor, weights: Sequence[Tensor], shared: SharedInput) -> list[Tensor]:
    """Apply column-parallel linears to inputs that all ranks share.

    Args:
        x: Input (b, s, d_in) of all linears, or the inputs of ``separate`` ones side by side,
            (b, s, Σ d_in_i); replicated or sharded along ``shared.dim``.
        weights: One (d_out_i/T, d_in_i), Shard(0), per linear.
        shared: How x arrives.

    Returns:
        One output (b, s, d_out_i/T), Shard(-1), per linear.
    """
    outputs = _SharedLinear.apply(x, shared, *weights)
    if not shared.separate:
        if len(weights) == 1:  # the backward of a split copies the gradient, even of a single part
            return list(outputs)
        return list(outputs[0].split([weight.shape[0] for weight in weights], dim=-1))
    found: list[Tensor] = []
    for out, run in zip(outputs, _runs(weights), strict=True):
        # The product of a run of n is (n, b·s, d_out/T).
        found += [out] if len(run) == 1 else out.unflatten(1, (x.shape[0], -1)).unbind()
    return found


class ColumnEdge(Edge):
    """Start of a Megatron pair: the norm, if any, then the column-parallel linears of a group.

    A pair is two dense linears, or the factors A and B of one (vanilla tensor parallelism).
    """

    dim: int | None = None
    """The dimension along which the input is sharded: `TOKENS`, `FEATURES`, or None."""

    grouped: bool = True
    """Whether the group's linears share one backward all-reduce of their input."""

    def forward(
        self, x: Tensor, linears: Sequence[nn.Module], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Apply the group.

        Args:
            x: Input (b, s, d_in), replicated, or sharded along ``dim``.
            linears: The group; the weight (d_out/T, d_in), or A (r/T, d_in), is Shard(0).
            norm: Norm before them; weight (d_in,), Replicate.

        Returns:
            One output (b, s, d_out/T), or latent (b, s, r/T), Shard(-1), per linear.
        """
        if self.ranks.size == 1:
            x = x if norm is None else norm(x)
            return [linear(x) for linear in linears]
        if norm is not None:
            x = normalize(x, norm, self.ranks if self.dim == TOKENS else SINGLE)
        factors: list[Any] = [getattr(linear, "A", linear) for linear in linears]
        weights = [local(factor.weight) for factor in factors]
        shared = SharedInput(self.ranks, self.dim)
        if self.grouped:
            return shared_linears(x, weights, shared)
        return [shared_linears(x, [weight], shared)[0] for weight in weights]


class RowEdge(Edge):
    """End of a Megatron pair: row-parallel linears and the sum over the ranks."""

    dim: int | None = None
    """The dimension of which each rank keeps a shard: `TOKENS`, `FEATURES` (the heads of q, k and
    v), or None for the whole sum."""

    def forward(self, x: Tensor | Sequence[Tensor], linears: Sequence[nn.Module]) -> list[Tensor]:
        """Apply the linears.

        Args:
            x: Input (b, s, d_in/T), Shard(-1), of one linear, or one latent (b, s, r/T) per linear.
            linears: The linears; the weight (d_out, d_in/T), or B (d_out, r/T), is Shard(1).

        Returns:
            One output per linear: (b, s, d_out), replicated, or its shard along ``dim``.
        """
        # Not an all-reduce and a slice: the same forward, but it loses gradients.
        total = reduce_over_ranks if self.dim is None else partial(scatter_sum, dim=self.dim)
        inputs = [x] if isinstance(x, Tensor) else x
        factors: list[Any] = [getattr(linear, "B", linear) for linear in linears]
        weights = [local(factor.weight) for factor in factors]
        # Each product is reduced before the next one exists: only one of them has its full width.
        pairs = zip(inputs, weights, strict=True)
        return [total(F.linear(part, weight), self.ranks) for part, weight in pairs]


class DownEdge(Edge):
    """End of a chunk: the norm, if any, then A of every linear, and the chunk's one reduction."""

    grouped: bool = True
    """Whether the latents of a group share one collective."""

    sequence: bool = False
    """Whether the reduction is a reduce-scatter over the tokens."""

    online: bool = True
    """Whether the norm's statistic is reduced with the latents, or before them."""

    def forward(
        self, x: "Tensor | Gated", linears: Sequence[LowRankLinear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Compress one input into the latents of a group.

        Args:
            x: Input (b, s, d_in/T), Shard(-1); on one rank also its two factors.
            linears: The group; all take the same input. A (r, d_in/T) is Shard(1).
            norm: Norm before them; weight (d_in/T,), Shard(0).

        Returns:
            One pre-activation latent A x (b, s, r) per linear, replicated; (b, s/T, r), Shard(1),
            for `sequence`.
        """
        weights = [local(linear.A.weight) for linear in linears]
        if isinstance(x, Gated):
            return [gated_linear(x, weight) for weight in weights]
        single = self.ranks.size == 1
        if single:
            x = x if norm is None else norm(x)
            if not torch.is_grad_enabled():
                return [linear.A(x) for linear in linears]
        # One rank has no message to share, and separate outputs need no copies.
        how = Reduction(self.ranks, self.grouped and not single, self.sequence)
        if norm is not None and not single:
            if self.online:
                return online_down(x, *norm_numbers(norm), weights, how)
            x = sync_norm(x, *norm_numbers(norm), self.ranks)
        return down_products(x, weights, how)


class UpEdge(Edge):
    """Start of a chunk: column-parallel B of every linear of the group, each on its own latent."""

    grouped: bool = True
    """Whether the latents of a group share one collective and, if their shapes are equal, one
    batched product."""

    sequence: bool = False
    """Whether the latents arrive as token shards."""

    def forward(
        self,
        latents: Sequence[Tensor],
        linears: Sequence[LowRankLinear],
        use_silu: Sequence[bool] | None = None,
    ) -> list[Tensor]:
        """Expand the latents of a group.

        Args:
            latents: One (b, s, r) per linear, replicated; (b, s/T, r), Shard(1), for `sequence`;
                after mixing and, without ``use_silu``, activation.
            linears: The group; B (d_out/T, r) is Shard(0).
            use_silu: On one rank, the latents to which σ = SiLU has not been applied yet.

        Returns:
            One output (b, s, d_out/T), Shard(-1), per linear.
        """
        if self.ranks.size == 1:
            silu = use_silu or [False] * len(linears)
            return [
                gated_linear(Gated(latent, None, True), linear.B.weight)
                if active
                else linear.B(latent)
                for latent, linear, active in zip(latents, linears, silu, strict=True)
            ]
        weights = [local(linear.B.weight) for linear in linears]
        separate = self.grouped and len(weights) > 1
        shared = SharedInput(self.ranks, TOKENS if self.sequence else None, "input", separate)
        if separate:
            return shared_linears(torch.cat(list(latents), dim=-1), weights, shared)
        pairs = zip(latents, weights, strict=True)
        return [shared_linears(latent, [weight], shared)[0] for latent, weight in pairs]


class MixEdge(Edge):
    """LaX: add the previous block's latents, projection by projection; local on any ranks."""

    sharded: bool = False
    """Whether a rank holds only a part of each latent, along r or along the tokens. Then the
    gradient of a learned gate is a sum over the ranks."""

    def forward(
        self,
        latents: Sequence[Tensor],
        carried: Sequence[Tensor] | None,
        linears: Sequence[LowRankLinear],
    ) -> list[Tensor]:
        """Compute A_i x_i + g · A_(i-1) x_(i-1).

        Args:
            latents: This block's A_i x_i, one (b, s, r) per linear, in the plan's layout.
            carried: The previous block's, in the same order and layout; None in the first block.
            linears: The group, with the gates g (1,), Replicate, where they are learned (else
                g = 1).

        Returns:
            The mixed latents, in the same layout.
        """
        if carried is None:
            return list(latents)
        gates = [local(linear.gate) for linear in linears if linear.gate is not None]
        if gates and self.sharded:  # one collective for the group
            gates = list(copy_to_ranks(torch.cat(gates), self.ranks).split(1))
        gate = iter(gates)
        return [
            latent + (previous if linear.gate is None else next(gate) * previous)
            for latent, previous, linear in zip(latents, carried, linears, strict=True)
        ]
