# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bottleneck-aware tensor parallelism (BOOST): ranks communicate in the r-wide bottleneck.

The residual stream is sharded along d. Every A is row-parallel: forward communicates only the sum
of its r-wide products over the ranks. Every B is column-parallel and its input, the latents, is
replicated: backward communicates only the r-wide gradient of the latents. Attention heads, SwiGLU
and residual additions work on shards.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.layers import LowRankLinear
from torchtitan_lr.parallel.tensor.collectives import TOKENS, Ranks
from torchtitan_lr.parallel.tensor.ends import ScatterHead, ShardedEmbedEdge, VocabParallelHead
from torchtitan_lr.parallel.tensor.online_norm import (
    OnlineNorm,
    online_down,
    summed_down,
    sync_norm,
)
from torchtitan_lr.parallel.tensor.plan import (
    Styles,
    TensorParallelPlan,
    TPSettings,
    low_rank_edges,
    model_ends,
    on_ranks,
)
from torchtitan_lr.parallel.tensor.shared_linear import SharedInput, shared_linear, shared_linears
from torchtitan_lr.parallel.tensor.styles import Edge, ShardedMixEdge, epsilon, local


class BTPDownEdge(Edge):
    """End of a chunk: norm, row-parallel A, and the one reduction of the chunk.

    Args:
        ranks: The tensor-parallel ranks.
        grouped: Whether the latents of a group share one collective.
        sequence: Whether the reduction is a reduce-scatter over the tokens.
        online: Whether the norm's statistic is reduced with the latents, or before them.
        column: For an online norm, whether the statistic is a column of the latents' message.
    """

    def __init__(
        self, ranks: Ranks, grouped: bool, sequence: bool, online: bool, column: bool
    ) -> None:
        super().__init__(ranks)
        self.online = online
        # The norm's width and ε are set in forward, which receives the norm.
        self.exchange = OnlineNorm(ranks, 0, 0.0, grouped, column, sequence)

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Compress a sharded input into the latents of a group.

        Args:
            x: Input (b, s, d_in/T), Shard(-1).
            linears: The group; A (r, d_in/T) is Shard(1).
            norm: Norm before them; weight (d_in/T,), Shard(0).

        Returns:
            One latent (b, s, r) per linear, replicated; (b, s/T, r), Shard(1), for `sequence`.
        """
        weights = [local(linear.A.weight) for linear in linears]
        if norm is not None:
            gamma, dim, eps = local(norm.weight), norm.normalized_shape[0], epsilon(norm)
            if self.online:
                return online_down(x, gamma, weights, replace(self.exchange, dim=dim, eps=eps))
            x = sync_norm(x, gamma, dim, eps, self.ranks)
        return summed_down(x, weights, self.exchange)


class BTPUpEdge(Edge):
    """Start of a chunk: column-parallel B on replicated latents.

    Args:
        ranks: The tensor-parallel ranks.
        grouped: Whether the latents of a group share one collective and, if their shapes are
            equal, one batched product.
        sequence: Whether the latents arrive as token shards.
    """

    def __init__(self, ranks: Ranks, grouped: bool, sequence: bool) -> None:
        super().__init__(ranks)
        self.grouped, self.sequence = grouped, sequence

    def forward(self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]) -> list[Tensor]:
        """Expand the latents of a group.

        Args:
            latents: One (b, s, r) per linear, replicated; (b, s/T, r), Shard(1), for `sequence`.
            linears: The group; B (d_out/T, r) is Shard(0).

        Returns:
            One output (b, s, d_out/T), Shard(-1), per linear.
        """
        weights = [local(linear.B.weight) for linear in linears]
        shared = SharedInput(self.ranks, TOKENS if self.sequence else None, saved="input")
        if self.grouped and len(weights) > 1:
            latent = torch.cat(list(latents), dim=-1)
            return shared_linears(latent, weights, replace(shared, separate=True))
        pairs = zip(latents, weights, strict=True)
        return [shared_linear(latent, [weight], shared) for latent, weight in pairs]


class BTP(TensorParallelPlan):
    """Bottleneck-aware: stream Shard(-1), A row-parallel, B column-parallel."""

    name = "btp"
    factors = Shard(1), Shard(0)
    shards_stream = True
    choices = frozenset({"grouping", "norm", "norm_stat", "comm", "head"})

    def is_default(self, args: LlamaArgs) -> bool:
        """Return whether the model is low-rank."""
        return args.low_rank

    def styles(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return the styles, see `TensorParallelPlan.styles`."""
        blocks = self.low_rank_blocks(self.edges(args, settings))
        embed = on_ranks(ShardedEmbedEdge)
        if settings.head == "scatter":
            return blocks | model_ends(settings, embed, ScatterHead, Shard(0))
        return blocks | model_ends(settings, embed, partial(VocabParallelHead, stream="features"))

    def edges(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return the edges of a block; arguments as of `styles`."""
        sequence = settings.comm == "sequence"
        online, column = settings.norm == "online", settings.norm_stat == "column"
        down = on_ranks(BTPDownEdge, settings.grouping, sequence, online, column)
        up = on_ranks(BTPUpEdge, settings.grouping, sequence)
        mix = on_ranks(ShardedMixEdge, sequence) if args.model_family.carries_latents else None
        return low_rank_edges(down, up, mix)
