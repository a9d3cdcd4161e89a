# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The two ends of the model: the embedding, and the final norm with the head.

On several ranks the embedding is sharded along d, and the head along the vocabulary. A row-parallel
head would all-reduce logits and is not supported.
"""

from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.collectives import (
    FEATURES,
    TOKENS,
    Edge,
    copy_to_ranks,
    gather_partial,
    gather_partial_wide,
    gather_replicated,
    local,
    split_replicated,
)
from torchtitan_lr.models.lanes import lane_linear
from torchtitan_lr.models.loss import linear_loss
from torchtitan_lr.models.norms import norm_numbers, normalize, sync_norm

Stream = Literal["replicated", "features", "scatter", "tokens", "lanes"]
"""Layout of the residual stream in front of the head: (b, s, d) on every rank; (b, s, d/T),
Shard(-1); the same, gathered by `norms.sync_norm`; (b, s/T, d), Shard(1); or CAAT-Net's
(b, s, g, d), of which each lane scores its part of the vocabulary, so that nothing is gathered."""


class EmbedEdge(Edge):
    """The embedding look-up, of this rank's features."""

    gather: bool = False
    """Whether all features are then gathered on every rank."""

    sequence: bool = False
    """Whether each rank then keeps only its shard of the tokens."""

    lanes: int = 1
    """CAAT-Net's lanes G of the model, all of which start with the same vectors."""

    wide: bool = True
    """As in `LaneRowEdge`."""

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1).

        Returns:
            Tensor (b, s, d/T), Shard(-1); with `gather` (b, s, d), replicated, or (b, s/T, d),
            Shard(1), for `sequence`; with lanes (b, s, g, d), those of this rank.
        """
        x = F.embedding(tokens, local(embedding.weight))
        if self.lanes > 1:
            # The gradient is a sum over all lanes, the only reduction of the embedding. A rank owns
            # d/T of the embedding, so a reduce-scatter is enough.
            x = (gather_partial_wide if self.wide else gather_partial)(x, self.ranks)
            return x.unsqueeze(2).expand(-1, -1, self.lanes // self.ranks.size, -1)
        if self.gather:
            x = gather_replicated(x, self.ranks, FEATURES)
        return split_replicated(x, self.ranks, TOKENS) if self.sequence else x


class HeadEdge(Edge):
    """The final norm on all features, then the output projection, sharded along the vocabulary."""

    stream: Stream = "replicated"
    """Layout of the residual stream."""

    loss_parallel: bool = True
    """Whether logits stay sharded, as a DTensor for torch's ``loss_parallel`` context, or are
    gathered."""

    def forward(
        self, x: Tensor, norm: nn.RMSNorm, output: nn.Linear, targets: Tensor | None = None
    ) -> Tensor:
        """Compute logits, or the loss without whole logits.

        For the loss the ranks exchange their log-sum-exps for every chunk of tokens, and at the end
        the loss.

        Args:
            x: The residual stream, in the layout `stream`.
            norm: The final norm; weight (d,), Replicate, or (d/T,), Shard(0), for ``scatter``.
            output: The head; weight (V/T, d), Shard(0).
            targets: Token ids (b, s), replicated; not used where logits are gathered.

        Returns:
            With targets the sum of -log p(target), a replicated scalar, see `linear_loss`. Else
            logits (b, s, V): a DTensor with Shard(-1), or a plain tensor, the same on every rank.
        """
        weight, ranks = local(output.weight), self.ranks
        x = self.normalized(x, norm)
        if targets is not None and (self.loss_parallel or ranks.size == 1):
            return linear_loss(x, weight, targets, ranks)
        logits = lane_linear(x, weight) if self.stream == "lanes" else F.linear(x, weight)
        if ranks.size > 1 and self.loss_parallel:
            mesh = cast(DTensor, output.weight).device_mesh
            return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)
        return gather_replicated(logits, ranks, FEATURES)

    def normalized(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Return the input of the product; replicated, its gradient is summed over the ranks."""
        if self.ranks.size == 1:
            return norm(x)
        if self.stream == "scatter":
            # Cheaper backward than that of ``features``: γ ⊙ x is gathered and then scaled by rstd,
            # so that the gathered tensor's gradient is reduce-scattered at once instead of
            # all-reduced and sliced.
            return sync_norm(x, *norm_numbers(norm), self.ranks, gather=True)
        if self.stream == "lanes":
            return normalize(x, norm, self.ranks)
        if self.stream == "tokens":
            return gather_partial(normalize(x, norm, self.ranks), self.ranks, TOKENS)
        if self.stream == "features":
            x = gather_replicated(x, self.ranks, FEATURES)
        return copy_to_ranks(normalize(x, norm), self.ranks)


class TokenEmbedding(nn.Embedding):
    """Token embedding whose look-up is an edge."""

    # A child of this module, not of the model: a pipeline split keeps both on one stage, and FSDP's
    # hooks run before the edge.
    embed: Edge

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens (b, s) as (b, s, d); with lanes at full rank as (b, s, G, d)."""
        out: Tensor = self.embed(input, self)
        return out


class OutputProjection(nn.Linear):
    """Output projection that applies the final norm too, through one edge."""

    head: Edge

    def forward(  # type: ignore[override]
        self, input: Tensor, norm: nn.RMSNorm, targets: Tensor | None = None
    ) -> Tensor:
        """Turn the residual stream (b, s, d) into logits (b, s, V) or a loss, see `HeadEdge`."""
        # A call of this module for the loss too, so that FSDP has gathered the weight.
        out: Tensor = self.head(input, norm, self, targets)
        return out
