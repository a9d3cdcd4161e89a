# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Megatron-LM's tensor parallelism for the full-rank model, with and without token shards.

q, k, v, gate and up are column-parallel, o and down row-parallel. Between the pairs the residual
stream is replicated (Megatron-LM, section 3) or sharded along the tokens (Korthikanti et al.,
section 4.2.2), where the norms run on token shards too.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.collectives import (
    TOKENS,
    Ranks,
    reduce_over_ranks,
    scatter_sum,
)
from torchtitan_lr.parallel.tensor.ends import GatheredEmbedEdge, VocabParallelHead
from torchtitan_lr.parallel.tensor.plan import (
    Styles,
    TensorParallelPlan,
    TPSettings,
    dense_blocks,
    model_ends,
    on_ranks,
)
from torchtitan_lr.parallel.tensor.shared_linear import SharedInput, shared_linear
from torchtitan_lr.parallel.tensor.styles import Edge, local, replicated_norm, token_sharded_norm


class ColumnEdge(Edge):
    """Norm and the column-parallel linears of a group.

    Args:
        ranks: The tensor-parallel ranks.
        sequence: Whether the stream is sharded along the tokens.
    """

    def __init__(self, ranks: Ranks, sequence: bool) -> None:
        super().__init__(ranks)
        self.sequence = sequence

    def forward(self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.RMSNorm) -> list[Tensor]:
        """Apply the group.

        Args:
            x: Residual stream (b, s, d), replicated; (b, s/T, d), Shard(1), for `sequence`.
            linears: The group; weight (d_out/T, d) is Shard(0).
            norm: Norm before them; weight (d,), Replicate.

        Returns:
            One output (b, s, d_out/T), Shard(-1), per linear.
        """
        x = token_sharded_norm(x, norm, self.ranks) if self.sequence else replicated_norm(x, norm)
        weights = [local(linear.weight) for linear in linears]
        shared = SharedInput(self.ranks, TOKENS if self.sequence else None)
        out = shared_linear(x, weights, shared)
        return list(out.split([weight.shape[0] for weight in weights], dim=-1))


class RowEdge(Edge):
    """A row-parallel linear and the sum over the ranks.

    Args:
        ranks: The tensor-parallel ranks.
        sequence: Whether each rank keeps a shard of the tokens.
    """

    def __init__(self, ranks: Ranks, sequence: bool) -> None:
        super().__init__(ranks)
        self.sequence = sequence

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.RMSNorm | None = None
    ) -> list[Tensor]:
        """Apply the linears.

        Args:
            x: Input (b, s, d_in/T), Shard(-1).
            linears: One linear; weight (d_out, d_in/T) is Shard(1).
            norm: None; part of the edge's interface.

        Returns:
            One output per linear: (b, s, d_out), replicated, or (b, s/T, d_out), Shard(1), for
            `sequence`.
        """
        return [self._reduce(F.linear(x, local(linear.weight))) for linear in linears]

    def _reduce(self, out: Tensor) -> Tensor:
        if self.sequence:
            return scatter_sum(out, self.ranks, TOKENS)
        return reduce_over_ranks(out, self.ranks)


class Megatron(TensorParallelPlan):
    """Megatron-LM, full rank: stream replicated, or Shard(1) if `comm` is ``sequence``."""

    name = "megatron"
    low_rank = False
    choices = frozenset({"comm"})

    def is_default(self, args: LlamaArgs) -> bool:
        """Return whether the model is full-rank without lanes."""
        return not args.low_rank and args.lanes == 1

    def styles(self, args: LlamaArgs, settings: TPSettings) -> Styles:
        """Return the styles, see `TensorParallelPlan.styles`."""
        sequence = settings.comm == "sequence"
        blocks = dense_blocks(on_ranks(ColumnEdge, sequence), on_ranks(RowEdge, sequence))
        head = partial(VocabParallelHead, stream="tokens" if sequence else "replicated")
        return blocks | model_ends(settings, on_ranks(GatheredEmbedEdge, sequence), head)
