# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs of column- and row-parallel linears: Megatron-LM at full rank, and the vanilla plans.

The first linear of a pair is column-parallel: its input is replicated, or gathered, and backward
sums the input's gradient over the ranks. The second one is row-parallel: forward sums its output.
At full rank the pairs are q, k, v with o, and gate, up with down. The vanilla plans (BOOST's
baselines) make a pair of the factors A and B of every linear: messages are as wide as its output,
and the latents are sharded along r. So `VanillaDown` starts a pair; BTP's `DownEdge` ends a chunk.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import FEATURES, TOKENS, Ranks, all_gather, local, start_sum, wait
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.kept import end_recomputation, keep
from torchtitan_lr.models.linears import LowRankLinear, activated, concatenated
from torchtitan_lr.parallel.edge import (
    Edge,
    EmbedEdge,
    HeadEdge,
    MixEdge,
    gather_and_copy_to_ranks,
    normalize,
    reduce_from_ranks,
    reduce_scatter_to_ranks,
    summed_products,
)
from torchtitan_lr.parallel.plan_parts import (
    COLUMN_ROW,
    EdgeParallel,
    Plan,
    Styles,
    TPSettings,
    dense_blocks,
    low_rank_blocks,
    model_ends,
    on_ranks,
)


class ColumnEdge(Edge):
    """Start of a full-rank pair: the norm, if any, then the column-parallel linears of a group."""

    def __init__(self, ranks: Ranks, comm: str = "all_reduce") -> None:
        super().__init__(ranks)
        self.comm = comm

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Map x (b, s, d_in), or (b, s/T, d_in), by weights (d_out/T, d_in), Shard(0)."""
        # Returns one output (b, s, d_out/T), Shard(-1), per linear. The norm's weight is Replicate.
        sequence = self.comm == "sequence"
        if norm is not None:
            x = normalize(x, norm, self.ranks if sequence else None)
        weights = [local(linear.weight) for linear in linears]
        return column_parallel(x, weights, self.ranks, TOKENS if sequence else None)


class RowEdge(Edge):
    """End of a full-rank pair: a row-parallel linear and the sum over the ranks."""

    def __init__(self, ranks: Ranks, comm: str = "all_reduce") -> None:
        super().__init__(ranks)
        self.comm = comm

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Map x (b, s, d_in/T), Shard(-1), by weight (d_out, d_in/T), Shard(1)."""
        # The output (b, s, d_out) is replicated; for ``sequence`` it is (b, s/T, d_out), Shard(1).
        terms = [F.linear(x, local(linear.weight)) for linear in linears]
        if self.comm == "sequence":
            return [reduce_scatter_to_ranks(term, self.ranks, TOKENS) for term in terms]
        return [reduce_from_ranks(term, self.ranks) for term in terms]


class TokensHead(HeadEdge):
    """The head of a stream that is sharded along the tokens."""

    def normalized(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Normalize and gather x (b, s/T, d), Shard(1)."""
        return gather_and_copy_to_ranks(normalize(x, norm, self.ranks), self.ranks, TOKENS)


def megatron(args: LlamaArgs, settings: TPSettings) -> Styles:
    """Return Megatron-LM's plan: q, k, v, gate, up column-parallel, o and down row-parallel."""
    # Between the pairs the residual stream is replicated (Megatron-LM, section 3) or sharded along
    # the tokens (Korthikanti et al., section 4.2.2), where the norms run on token shards too.
    comm = settings.comm
    blocks = dense_blocks(MEGATRON, on_ranks(ColumnEdge, comm=comm), on_ranks(RowEdge, comm=comm))
    head = TokensHead if comm == "sequence" else HeadEdge
    return blocks | model_ends(
        on_ranks(EmbedEdge, comm=comm), on_ranks(head, loss_parallel=settings.loss_parallel)
    )


MEGATRON = Plan(megatron, COLUMN_ROW, COLUMN_ROW, low_rank=False, choices={"comm"})


class VanillaDown(Edge):
    """Start of the pairs A, B of a group: the norm, if any, then column-parallel A's."""

    def __init__(self, ranks: Ranks, grouping: bool, heads: bool = False) -> None:
        super().__init__(ranks)
        self.grouping = grouping  # whether the group shares one all-reduce of its input in backward
        self.heads = heads  # whether the input is sharded along its features: attention's output

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Map x (b, s, d_in), or (b, s, d_in/T), by A (r/T, d_in), Shard(0): (b, s, r/T) each."""
        if norm is not None:
            x = normalize(x, norm)
        weights = [local(linear.A.weight) for linear in linears]
        dim = FEATURES if self.heads else None
        if self.grouping:
            return column_parallel(x, weights, self.ranks, dim)
        return [column_parallel(x, [weight], self.ranks, dim)[0] for weight in weights]


class VanillaUp(Edge):
    """End of the pairs A, B of a group: σ, row-parallel B's and the sums over the ranks."""

    def __init__(self, ranks: Ranks, heads: bool = False) -> None:
        super().__init__(ranks)
        self.heads = heads  # whether each rank keeps its features, the heads of q, k and v

    def forward(
        self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear], use_silu: Sequence[bool]
    ) -> list[Tensor]:
        """Map latents (b, s, r/T), Shard(-1), by B (d_out, r/T), Shard(1)."""
        # Outputs are (b, s, d_out), replicated, for ``heads`` (b, s, d_out/T), Shard(-1).
        # Each product is reduced before the next one exists: only one of them has its full width.
        total = reduce_scatter_to_ranks if self.heads else reduce_from_ranks
        outputs = []
        for h, linear in zip(activated(latents, use_silu), linears, strict=True):
            outputs.append(total(F.linear(h, local(linear.B.weight)), self.ranks))
        return outputs


def vanilla(args: LlamaArgs, settings: TPSettings) -> Styles:
    """Return the fair vanilla plan, in which each rank computes its own heads."""
    # q, k and v are reduce-scattered over the heads, and attention's output is gathered before A_o.
    styles = vanilla_replicated(args, settings)
    qkv, o = styles["layers.*.attention.qkv"], styles["layers.*.attention.o"]
    up = on_ranks(VanillaUp, heads=True)
    down = on_ranks(VanillaDown, grouping=settings.grouping, heads=True)
    styles["layers.*.attention.qkv"] = EdgeParallel(edges={**qkv.edges, "up": up})
    styles["layers.*.attention.o"] = EdgeParallel(edges={**o.edges, "down": down})
    return styles


def vanilla_replicated(args: LlamaArgs, settings: TPSettings) -> Styles:
    """Return BOOST's baseline, which all-reduces q, k and v: every rank computes all heads."""
    blocks = low_rank_blocks(
        args,
        VANILLA,  # both vanilla plans place weights and stream alike
        on_ranks(VanillaDown, grouping=settings.grouping),
        on_ranks(VanillaUp),
        on_ranks(MixEdge, sharded=True),
    )
    head = on_ranks(HeadEdge, loss_parallel=settings.loss_parallel)
    return blocks | model_ends(on_ranks(EmbedEdge), head)


VANILLA = Plan(vanilla, COLUMN_ROW, COLUMN_ROW, choices={"grouping"})
VANILLA_REPLICATED = replace(VANILLA, split=vanilla_replicated, shards_heads=False)


class _ColumnParallel(torch.autograd.Function):
    """Forward a gather of the input, if it is sharded; backward the sum of its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # One variable argument: see `models.linears.down_products`.
        x, ranks, dim, *weights = inputs  # (b, s, d_in), replicated or sharded; (d_out_i/T, d_in)
        whole = x if dim is None else all_gather([x], ranks, dim)[0]
        ctx.save_for_backward(whole, *weights)
        end_recomputation(whole, *weights)
        ctx.ranks, ctx.dim = ranks, dim
        (out,) = keep(lambda: (F.linear(whole, concatenated(weights)),))
        return out  # (b, s, Σ d_out_i/T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # Linears and collective are one Function for this: the reduction of the input's gradient
        # runs while the gradients of the weights are computed.
        whole, *weights = ctx.saved_tensors
        # No name for the term itself: it would outlive the reduction.
        summed = start_sum(summed_products(gradient, weights), ctx.ranks, ctx.dim, owned=True)
        dw = gradient.flatten(0, 1).T @ whole.flatten(0, 1)  # (Σ d_out_i/T, d_in)
        dweights = dw.split([weight.shape[0] for weight in weights])
        return (wait(summed), None, None, *dweights)


def column_parallel(
    x: Tensor, weights: Sequence[Tensor], ranks: Ranks, dim: int | None = None
) -> list[Tensor]:
    """Apply column-parallel weights (d_out_i/T, d_in), Shard(0), to one x (b, s, d_in)."""
    # Forward gathers x along ``dim`` and backward reduce-scatters; None is for a replicated x,
    # whose gradient is all-reduced. Low-rank checkpointing saves outputs (b, s, d_out_i/T).
    out: Tensor = _ColumnParallel.apply(x, ranks, dim, *weights)
    if len(weights) == 1:  # the backward of a split copies the gradient, even of a single part
        return [out]
    return list(out.split([weight.shape[0] for weight in weights], dim=-1))
