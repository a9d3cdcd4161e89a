# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Experimental: bottleneck-aware tensor parallelism with partial reductions.

BTP sums the r-wide latents over all ranks. Here CAAT-Net's partial reduction sums only the first
int(p · r) channels; each lane keeps its own others, see `models.lane_edges`. The latents and their
gradients differ between ranks, so the norm's statistic is reduced in both passes (`sync_norm`).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.lane_edges import lane_linear, lane_terms
from torchtitan_lr.models.layers import LowRankLinear
from torchtitan_lr.parallel.tensor.btp import BTP
from torchtitan_lr.parallel.tensor.caat import share_over_ranks
from torchtitan_lr.parallel.tensor.collectives import Ranks
from torchtitan_lr.parallel.tensor.online_norm import sync_norm
from torchtitan_lr.parallel.tensor.plan import Styles, TPSettings, low_rank_edges, on_ranks
from torchtitan_lr.parallel.tensor.styles import Edge, epsilon, local


class BTPCaatDownEdge(Edge):
    """End of a chunk: norm, row-parallel A, and the partial reduction of the group's latents.

    Args:
        ranks: The tensor-parallel ranks.
        args: The model's arguments.
        grouped: Whether the shared channels of a group are one message.
        wide: Whether backward sums in fp32 while it sends half precision.
    """

    def __init__(self, ranks: Ranks, args: LlamaArgs, grouped: bool, wide: bool) -> None:
        super().__init__(ranks)
        self.args, self.grouped, self.wide = args, grouped, wide

    def forward(
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Compress a sharded input into the latents of a group.

        Args:
            x: Input (b, s, d_in/T), Shard(-1).
            linears: The group; A (r, d_in/T) is Shard(1).
            norm: Norm before them; weight (d_in/T,), Shard(0).

        Returns:
            The latents of this rank's lanes, one (b, s, g, r) per linear.
        """
        if norm is not None:
            width = norm.normalized_shape[0]
            x = sync_norm(x, local(norm.weight), width, epsilon(norm), self.ranks)
        weights = [local(linear.A.weight) for linear in linears]
        if self.grouped:
            return self._latents(x, weights)
        return [latent for weight in weights for latent in self._latents(x, [weight])]

    def _latents(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Compute the latents with one reduction: rows with shared outputs come first."""
        shared = [self.args.shared_channels(weight.shape[0]) for weight in weights]
        private = [weight.shape[0] - n for weight, n in zip(weights, shared, strict=True)]
        pairs = list(zip(weights, shared, strict=True))
        rows = torch.cat([*(w[:n] for w, n in pairs), *(w[n:] for w, n in pairs)])
        terms = lane_terms(x, rows, self.args.lanes // self.ranks.size)
        out = share_over_ranks(terms, sum(shared), self.ranks, self.wide)
        parts = out.split([*shared, *private], dim=-1)
        n = len(weights)
        return [torch.cat((parts[i], parts[n + i]), dim=-1) for i in range(n)]


class BTPCaatUpEdge(Edge):
    """Start of a chunk: column-parallel B on the lanes' own latents; no collective."""

    def forward(self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]) -> list[Tensor]:
        """Expand the latents of a group.

        Args:
            latents: The latents of this rank's lanes, one (b, s, g, r) per linear.
            linears: The group; B (d_out/T, r) is Shard(0).

        Returns:
            One output (b, s, d_out/T), Shard(-1), per linear.
        """
        pairs = zip(latents, linears, strict=True)
        return [lane_linear(latent, local(linear.B.weight)) for latent, linear in pairs]


class BTPCaat(BTP):
    """BTP's placements with partial reductions.

    The model's lanes are assigned to the ranks in order.
    """

    name = "btp_caat"
    lanes, experimental = True, True
    choices = frozenset({"grouping"})

    def is_default(self, args: LlamaArgs) -> bool:
        """Return False: the experimental plan must be named."""
        return False

    def edges(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return the edges of a block, see `BTP.edges`."""
        down = on_ranks(
            partial(BTPCaatDownEdge, args=args, grouped=settings.grouping, wide=settings.wide_sums)
        )
        return low_rank_edges(down, on_ranks(BTPCaatUpEdge))
