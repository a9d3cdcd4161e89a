# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs of column- and row-parallel linears: Megatron-LM and CAAT-Net at full rank, vanilla plans.

The first linear of a pair is column-parallel: its input is replicated, or gathered, and backward
sums the input's gradient over the ranks. The second one is row-parallel: forward sums its output.
At full rank the pairs are q, k, v with o, and gate, up with down. The vanilla plans (BOOST's
baselines) make a pair of the factors A and B of every linear: messages are as wide as its output,
and the latents are sharded along r. So their ``down`` starts a pair, where BTP's ends a chunk.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import (
    FEATURES,
    TOKENS,
    Ranks,
    all_gather,
    local,
    reduce,
    start_sum,
    wait,
)
from torchtitan_lr.models.lanes import lane_linear, lane_terms, share_channels
from torchtitan_lr.models.linears import (
    Gated,
    LowRankLinear,
    activated,
    all_padded,
    concatenated,
    down_products,
    gated_linear,
    summed_products,
    unpadded,
    used_width,
)
from torchtitan_lr.models.low_rank_checkpoint import end_recomputation, keep
from torchtitan_lr.models.one_device import Group
from torchtitan_lr.parallel.paired import (
    gather_and_copy_to_ranks,
    kept,
    paired,
    reduce_from_ranks,
    reduce_scatter_to_ranks,
)
from torchtitan_lr.parallel.plan_parts import COLUMN_ROW, Plan, normalize


class Megatron(Plan):
    """Megatron-LM's plan: q, k, v, gate, up column-parallel, o and down row-parallel."""

    # Between the pairs the residual stream is replicated (Megatron-LM, section 3) or sharded along
    # the tokens (Korthikanti et al., section 4.2.2), where the norms run on token shards too.
    factors = COLUMN_ROW
    low_rank = False
    choices = frozenset({"comm"})

    def product(
        self, group: Group, x: Tensor, linears: Sequence[nn.Linear], norm: Any
    ) -> list[Tensor]:
        """Start a pair, from x (b, s, d) or (b, s/T, d), Shard(1), or end it: likewise."""
        # In between, outputs and inputs are (b, s, d_out/T), Shard(-1). The norm's weight is
        # Replicate.
        weights = [local(linear.weight) for linear in linears]
        if group.opens:  # weights (d_out/T, d_in), Shard(0)
            x = normalize(x, norm, self.ranks if self.sequence else None)
            rows = used_width(weights[0], group.pads) - len(weights[0])  # of zeros
            return column_parallel(x, weights, self.ranks, TOKENS if self.sequence else None, rows)
        terms = []
        for weight in weights:  # (d_out, d_in/T), Shard(1)
            fits = x.shape[-1] == weight.shape[1]
            terms.append(F.linear(x, weight) if fits else gated_linear(Gated(x), weight))
        if self.sequence:
            return [reduce_scatter_to_ranks(term, self.ranks, TOKENS) for term in terms]
        return [reduce_from_ranks(term, self.ranks) for term in terms]

    def normalized(self, x: Tensor, norm: Any) -> Tensor:
        """Normalize x (b, s, d), or normalize and gather (b, s/T, d), Shard(1)."""
        if not self.sequence:
            return super().normalized(x, norm)
        return gather_and_copy_to_ranks(normalize(x, norm, self.ranks), self.ranks, TOKENS)


class Vanilla(Plan):
    """The fair vanilla plan, in which each rank computes its own heads."""

    factors = COLUMN_ROW
    choices = frozenset({"grouping"})

    def down(
        self, group: Group, x: Any, linears: Sequence[LowRankLinear], norm: Any
    ) -> list[Tensor]:
        """Start pairs: map x (b, s, d_in) by every A (r/T, d_in), Shard(0), to (b, s, r/T)."""
        # Attention's output, (b, s, d_in/T), is gathered in front of A_o if a rank has its heads.
        # With ``grouping`` the linears share one all-reduce of their input's gradient.
        if norm is not None:
            x = normalize(x, norm)
        weights = [local(linear.A.weight) for linear in linears]
        dim = FEATURES if self.shards_heads and group.name == "o" else None
        if self.settings.grouping:
            return column_parallel(x, weights, self.ranks, dim)
        return [column_parallel(x, [weight], self.ranks, dim)[0] for weight in weights]

    def up(
        self, group: Group, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]
    ) -> list[Tensor]:
        """End pairs: map latents (b, s, r/T), Shard(-1), by B (d_out, r/T), Shard(1)."""
        # Outputs are (b, s, d_out), replicated; q, k and v (b, s, d_out/T), Shard(-1), if a rank
        # has its heads. Each product is reduced before the next one exists: only one of them has
        # its full width.
        own_heads = self.shards_heads and group.name == "qkv"
        total = reduce_scatter_to_ranks if own_heads else reduce_from_ranks
        outputs = []
        for h, linear in zip(activated(latents, group.use_silu), linears, strict=True):
            outputs.append(total(F.linear(h, local(linear.B.weight)), self.ranks))
        return outputs


class VanillaReplicated(Vanilla):
    """BOOST's baseline, which all-reduces q, k and v: every rank computes all heads."""

    shards_heads = False


class CAAT(Plan):
    """CAAT-Net: Megatron's placements, with g = G/T lanes of `models.lanes` per rank, in order."""

    # A block sends the shared channels alone, behind its row-parallel linears: each lane's stream
    # is an input of its own, and only the norms' weights, which are Replicate, are shared.
    factors = COLUMN_ROW
    low_rank = False
    lanes = True

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1): (b, s, g, d), equal lanes."""
        x = F.embedding(tokens, local(embedding.weight))  # (b, s, d/T)
        # The gradient is a sum over all lanes, the only reduction of the embedding. A rank owns
        # d/T of the embedding, so a reduce-scatter is enough.
        gather = gather_and_sum_wide if self.settings.wide_sums else gather_and_copy_to_ranks
        x = gather(x, self.ranks)  # (b, s, d)
        return x.unsqueeze(2).expand(-1, -1, self.args.lanes // self.ranks.size, -1)

    def product(
        self, group: Group, x: Tensor, linears: Sequence[nn.Linear], norm: Any
    ) -> list[Tensor]:
        """Map the lanes' streams (b, s, g, d) to outputs side by side (b, s, d_out/T), or back."""
        weights = [local(linear.weight) for linear in linears]
        if not group.opens:  # weights (d, d_in/T), Shard(1)
            shared, lanes = self.args.shared_channels(self.args.dim), self.args.lanes
            terms = [lane_terms(x, weight, lanes // self.ranks.size) for weight in weights]
            wide_sums = self.settings.wide_sums
            return [share_channels(term, shared, wide_sums, self.ranks) for term in terms]
        x = normalize(x, norm, self.ranks)
        if x.shape[2] > 1:  # weights (d_out/T, d), Shard(0)
            return [lane_linear(x, weight) for weight in weights]
        return down_products(x.squeeze(2), weights)  # one product per kind of gradient

    def normalized(self, x: Tensor, norm: Any) -> Tensor:
        """Normalize x (b, s, g, d); the norm's weight (d,) is Replicate."""
        return normalize(x, norm, self.ranks)

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return (b, s, V/T): each lane scores its part of the vocabulary, nothing is gathered."""
        return lane_linear(x, weight)


# `gather_and_copy_to_ranks` whose backward sums in fp32 while it sends half precision.
gather_and_sum_wide = paired("GatherAndSumWide", kept, partial(reduce, wide=True))


class _ColumnParallel(torch.autograd.Function):
    """Forward a gather of the input, if it is sharded; backward the sum of its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # One variable argument: see `models.linears.down_products`.
        # (b, s, d_in), replicated or sharded; (d_out_i/T, d_in)
        x, ranks, dim, rows, *weights = inputs
        whole = x if dim is None else all_gather([x], ranks, dim)[0]
        ctx.save_for_backward(whole, *weights)
        end_recomputation(whole, *weights)
        ctx.ranks, ctx.dim, ctx.rows = ranks, dim, rows
        (out,) = keep(lambda: (F.linear(whole, concatenated(all_padded(weights, rows))),))
        return out  # (b, s, Σ d_out_i/T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # Linears and collective are one Function for this: the reduction of the input's gradient
        # runs while the gradients of the weights are computed.
        whole, *weights = ctx.saved_tensors
        # No name for the term itself: it would outlive the reduction.
        used = all_padded(weights, ctx.rows)
        summed = start_sum(summed_products(gradient, used), ctx.ranks, ctx.dim, owned=True)
        dw = gradient.flatten(0, 1).T @ whole.flatten(0, 1)  # (Σ d_out_i/T, d_in)
        dweights = dw.split([len(weight) for weight in used])
        return (wait(summed), None, None, None, *map(unpadded, dweights, weights))


def column_parallel(
    x: Tensor, weights: Sequence[Tensor], ranks: Ranks, dim: int | None = None, rows: int = 0
) -> list[Tensor]:
    """Apply column-parallel weights (d_out_i/T, d_in), Shard(0), to one x (b, s, d_in)."""
    # Forward gathers x along ``dim`` and backward reduce-scatters; None is for a replicated x,
    # whose gradient is all-reduced. Low-rank checkpointing saves outputs (b, s, d_out_i/T), which
    # have ``rows`` features of zeros more.
    out: Tensor = _ColumnParallel.apply(x, ranks, dim, rows, *weights)
    if len(weights) == 1:  # the backward of a split copies the gradient, even of a single part
        return [out]
    return list(out.split([len(weight) + rows for weight in weights], dim=-1))
