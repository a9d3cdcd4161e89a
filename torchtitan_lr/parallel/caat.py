# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net on several ranks: each rank has g = G/T lanes of `models.lanes`, in order.

The placements are Megatron's. A block sends the shared channels alone, behind its row-parallel
linears: each lane's stream is an input of its own, and only the norms' weights are shared.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import Ranks, local
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.lanes import LaneTerms, lane_linear
from torchtitan_lr.models.linears import down_products
from torchtitan_lr.parallel.edge import Edge, HeadEdge, gather_and_copy_to_ranks, normalize
from torchtitan_lr.parallel.plan_parts import (
    COLUMN_ROW,
    Plan,
    Styles,
    TPSettings,
    dense_blocks,
    model_ends,
    on_ranks,
)


class LaneColumnEdge(Edge):
    """Norm and a group that starts from the lanes' own streams."""

    def forward(self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.RMSNorm) -> list[Tensor]:
        """Map x (b, s, g, d) by weights (d_out/T, d), Shard(0): (b, s, d_out/T), Shard(-1)."""
        # The lanes' outputs are side by side, heads in their order. The norm's weight (d,) is
        # Replicate, and its gradient the only thing that is sent.
        x = normalize(x, norm, self.ranks)
        weights = [local(linear.weight) for linear in linears]
        if x.shape[2] > 1:
            return [lane_linear(x, weight) for weight in weights]
        return down_products(x.squeeze(2), weights)  # one product per kind of gradient


class LaneEmbedEdge(Edge):
    """The look-up of tokens; all lanes start with the same vectors."""

    def __init__(self, ranks: Ranks, lanes: int, wide_sums: bool) -> None:
        super().__init__(ranks)
        self.lanes, self.wide_sums = lanes // ranks.size, wide_sums

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1): (b, s, g, d)."""
        x = F.embedding(tokens, local(embedding.weight))  # (b, s, d/T)
        # The gradient is a sum over all lanes, the only reduction of the embedding. A rank owns
        # d/T of the embedding, so a reduce-scatter is enough.
        x = gather_and_copy_to_ranks(x, self.ranks, wide_sums=self.wide_sums)
        return x.unsqueeze(2).expand(-1, -1, self.lanes, -1)


class LaneHead(HeadEdge):
    """The head: each lane scores its part of the vocabulary, so that nothing is gathered."""

    def normalized(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Normalize x (b, s, g, d); the norm's weight (d,) is Replicate."""
        return normalize(x, norm, self.ranks)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the scores (b, s, V/T) of normalized streams (b, s, g, d)."""
        return lane_linear(x, weight)


def caat(args: LlamaArgs, settings: TPSettings) -> Styles:
    """Return the plan: Megatron's placements, with a residual stream for every lane."""
    wide_sums = settings.wide_sums
    shared = args.shared_channels(args.dim)
    row = on_ranks(LaneTerms, lanes=args.lanes, shared=shared, wide_sums=wide_sums)
    embed = on_ranks(LaneEmbedEdge, lanes=args.lanes, wide_sums=wide_sums)
    head = on_ranks(LaneHead, loss_parallel=settings.loss_parallel)
    return dense_blocks(CAAT, on_ranks(LaneColumnEdge), row) | model_ends(embed, head)


CAAT = Plan(caat, COLUMN_ROW, COLUMN_ROW, low_rank=False, lanes=True)
