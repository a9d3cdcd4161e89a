# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net's tensor parallelism: partially synchronized activations, a stream on every rank.

Weights are placed as in Megatron-LM's plan. A rank has g = G/T of the model's lanes with their
residual streams. After attention and after the feed-forward, ranks sum only the first int(p · d)
channels of the outputs: once in forward and once in backward, by the same operation (see
`models.lane_edges`). There is no reduction before the column-parallel linears. Gradients reach the
partial reduction through the norms, as unequal streams require (CAAT-Net, section 4 and appendix
B), so the gradients of the norms' weights are summed over the ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.lane_edges import lane_linear, lane_sum, lane_terms, spread
from torchtitan_lr.models.marks import save
from torchtitan_lr.parallel.tensor.collectives import (
    FEATURES,
    Ranks,
    all_gather,
    copy_to_ranks,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from torchtitan_lr.parallel.tensor.ends import VocabParallelHead
from torchtitan_lr.parallel.tensor.grouped_linear import concatenated_linear
from torchtitan_lr.parallel.tensor.plan import (
    Styles,
    TensorParallelPlan,
    TPSettings,
    dense_blocks,
    model_ends,
    on_ranks,
)
from torchtitan_lr.parallel.tensor.styles import Edge, local
from torchtitan_lr.parallel.tensor.wide_sums import wide_all_reduce, wide_reduce_scatter


class _ShareOverRanks(torch.autograd.Function):
    """Forward partial reduction, backward partial reduction; see `share_over_ranks`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: int, ranks: Ranks, wide: bool) -> Tensor:
        ctx.shared, ctx.ranks, ctx.wide = shared, ranks, wide
        (out,) = save(lambda: (spread(wait(start_all_reduce(lane_sum(x, shared), ranks)), x),))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.wide:
            total = wide_all_reduce(lane_sum(gradient, ctx.shared), ctx.ranks)
        else:
            own = lane_sum(gradient, ctx.shared, wide=False)
            total = wait(start_all_reduce(own, ctx.ranks))
        return spread(total, gradient), None, None, None


class _GatherForLanes(torch.autograd.Function):
    """Forward all-gather of the features, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, wide: bool) -> Tensor:
        ctx.ranks, ctx.wide = ranks, wide
        return all_gather(x, ranks, FEATURES)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.wide:
            return wide_reduce_scatter(gradient, ctx.ranks, FEATURES), None, None
        return wait(start_reduce_scatter(gradient, ctx.ranks, FEATURES)), None, None


def share_over_ranks(x: Tensor, shared: int, ranks: Ranks, wide: bool) -> Tensor:
    """Apply the partial reduction P to the lanes of all ranks.

    Args:
        x: The terms of this rank's lanes (b, s, g, d).
        shared: The number of the first channels, which are summed; 0 communicates nothing.
        ranks: The tensor-parallel ranks.
        wide: Whether backward sums in fp32 while it sends x's dtype.

    Returns:
        The result for each lane of this rank, (b, s, g, d).
    """
    if shared == 0:
        return x
    out: Tensor = _ShareOverRanks.apply(x, shared, ranks, wide)
    return out


def gather_for_lanes(x: Tensor, ranks: Ranks, wide: bool) -> Tensor:
    """Gather the features (b, s, d/T) for lanes whose streams differ afterwards.

    The gradient is a sum over all lanes, the only reduction of the embedding. A rank owns d/T of
    the embedding, so a reduce-scatter is enough.
    """
    out: Tensor = _GatherForLanes.apply(x, ranks, wide)
    return out


def summed_norm(x: Tensor, norm: nn.RMSNorm, ranks: Ranks) -> Tensor:
    """Normalize this rank's streams (b, s, g, d); the weight's gradient is summed over ranks."""
    weight = copy_to_ranks(local(norm.weight), ranks)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


class CaatColumnEdge(Edge):
    """Norm and column-parallel linears of each lane; no collective but the norm weight's."""

    def forward(self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.RMSNorm) -> list[Tensor]:
        """Apply the group.

        Args:
            x: The streams of this rank's lanes (b, s, g, d).
            linears: The group; weight (d_out/T, d) is Shard(0).
            norm: Norm before them; weight (d,), Replicate.

        Returns:
            One output (b, s, d_out/T), Shard(-1), per linear.
        """
        x = summed_norm(x, norm, self.ranks)
        weights = [local(linear.weight) for linear in linears]
        if x.shape[2] > 1:
            return [lane_linear(x, weight) for weight in weights]
        out = concatenated_linear(x.squeeze(2), weights)
        return list(out.split([weight.shape[0] for weight in weights], dim=-1))


class CaatRowEdge(Edge):
    """A row-parallel linear and the partial reduction.

    Args:
        ranks: The tensor-parallel ranks.
        args: The model's arguments.
        wide: Whether backward sums in fp32 while it sends half precision.
    """

    def __init__(self, ranks: Ranks, args: LlamaArgs, wide: bool) -> None:
        super().__init__(ranks)
        self.wide = wide
        self.lanes, self.shared = args.lanes // ranks.size, args.shared_channels(args.dim)

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Apply the linears.

        Args:
            x: Input (b, s, d_in/T), Shard(-1).
            linears: One linear; weight (d, d_in/T) is Shard(1).
            norm: None; part of the edge's interface.

        Returns:
            The term added to the streams of this rank's lanes, (b, s, g, d), per linear.
        """
        terms = [lane_terms(x, local(linear.weight), self.lanes) for linear in linears]
        return [share_over_ranks(term, self.shared, self.ranks, self.wide) for term in terms]


class CaatEmbedEdge(Edge):
    """Look up a shard of the features, then gather all features for every lane.

    Args:
        ranks: The tensor-parallel ranks.
        lanes: Lanes G of the model.
        wide: As in `CaatRowEdge`.
    """

    def __init__(self, ranks: Ranks, lanes: int, wide: bool) -> None:
        super().__init__(ranks)
        self.lanes, self.wide = lanes // ranks.size, wide

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1); gives (b, s, g, d)."""
        x = F.embedding(tokens, local(embedding.weight))
        x = gather_for_lanes(x, self.ranks, self.wide)
        return x.unsqueeze(2).expand(-1, -1, self.lanes, -1)


class CaatHead(VocabParallelHead):
    """Final norm and head: each lane computes logits of its part of the vocabulary, no gather."""

    def __init__(self, mesh: DeviceMesh, loss_parallel: bool) -> None:
        super().__init__(mesh, loss_parallel, "lanes")

    def forward(self, x: Tensor, norm: nn.RMSNorm | None, output: nn.Linear) -> Tensor:
        """Compute logits.

        Args:
            x: The streams of this rank's lanes (b, s, g, d).
            norm: The final norm; weight (d,), Replicate.
            output: The head; weight (V/T, d), Shard(0).

        Returns:
            As in `VocabParallelHead`.
        """
        return self.finish(lane_linear(self.normalized(x, norm), local(output.weight)))

    def normalized(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Return the streams of this rank's lanes (b, s, g, d), normalized."""
        return x if norm is None else summed_norm(x, norm, self.ranks)


class Caat(TensorParallelPlan):
    """CAAT-Net: Megatron's placements, with a separate residual stream for every lane.

    The model's lanes are assigned to the ranks in order.
    """

    name = "caat"
    low_rank, lanes = False, True

    def is_default(self, args: LlamaArgs) -> bool:
        """Return whether the model is full-rank with lanes."""
        return not args.low_rank and args.lanes > 1

    def styles(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return the styles, see `TensorParallelPlan.styles`."""
        wide = settings.wide_sums
        row = on_ranks(partial(CaatRowEdge, args=args, wide=wide))
        embed = on_ranks(partial(CaatEmbedEdge, lanes=args.lanes, wide=wide))
        return dense_blocks(on_ranks(CaatColumnEdge), row) | model_ends(settings, embed, CaatHead)
