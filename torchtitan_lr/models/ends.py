# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The two ends of the model: the embedding, and the final norm with the head.

On several ranks the embedding is sharded along d, and the head along the vocabulary. A row-parallel
head would all-reduce logits and is not supported.
"""

from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.collectives import (
    FEATURES,
    SINGLE,
    TOKENS,
    Edge,
    Ranks,
    all_gather,
    all_reduce,
    copy_to_ranks,
    gather_partial,
    gather_replicated,
    local,
    split_replicated,
)
from torchtitan_lr.models.head_loss import WHOLE, VocabularyPart, linear_loss
from torchtitan_lr.models.norms import epsilon, normalize, scattered_norm

Stream = Literal["replicated", "features", "scatter", "tokens"]
"""Layout of the residual stream in front of the head: (b, s, d) on every rank, (b, s, d/T) with
Shard(-1), the same with `norms.scattered_norm`, or (b, s/T, d) with Shard(1)."""


class EmbedEdge(Edge):
    """The embedding look-up, of this rank's features.

    Args:
        ranks: The tensor-parallel ranks.
        gather: Whether all features are then gathered on every rank.
        sequence: Whether each rank then keeps only its shard of the tokens.
    """

    def __init__(self, ranks: Ranks = SINGLE, gather: bool = False, sequence: bool = False) -> None:
        super().__init__(ranks)
        self.gather, self.sequence = gather, sequence

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1).

        Returns:
            Tensor (b, s, d/T), Shard(-1); with `gather` (b, s, d), replicated, or (b, s/T, d),
            Shard(1), for `sequence`.
        """
        x = F.embedding(tokens, local(embedding.weight))
        if self.gather:
            x = gather_replicated(x, self.ranks, FEATURES)
        return split_replicated(x, self.ranks, TOKENS) if self.sequence else x


class HeadEdge(Edge):
    """The final norm on all features, then the output projection, sharded along the vocabulary.

    Args:
        ranks: The tensor-parallel ranks.
        stream: Layout of the residual stream. ``scatter`` has a cheaper backward than ``features``:
            γ ⊙ x is gathered and then scaled by rstd, so that the gathered tensor's gradient is
            reduce-scattered at once instead of all-reduced and sliced.
        loss_parallel: Whether logits stay sharded, as a DTensor for torch's ``loss_parallel``
            context, or are gathered.
        mesh: The mesh of the ranks; None for one rank.
    """

    def __init__(
        self,
        ranks: Ranks = SINGLE,
        stream: Stream = "replicated",
        loss_parallel: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(ranks)
        self.mesh, self.stream, self.loss_parallel = mesh, stream, loss_parallel

    def forward(self, x: Tensor, norm: nn.RMSNorm | None, output: nn.Linear) -> Tensor:
        """Compute logits.

        Args:
            x: The residual stream, in the layout `stream`.
            norm: The final norm; weight (d,), Replicate, or (d/T,), Shard(0), for ``scatter``.
            output: The head; weight (V/T, d), Shard(0).

        Returns:
            Logits (b, s, V): a DTensor with Shard(-1), or a plain tensor, the same on every rank.
        """
        logits = self.product(self.normalized(x, norm), local(output.weight))
        if self.mesh is None:
            return logits
        if self.loss_parallel:
            return DTensor.from_local(logits, self.mesh, [Shard(-1)], run_check=False)
        return gather_replicated(logits, self.ranks, FEATURES)

    def loss(
        self, x: Tensor, norm: nn.RMSNorm | None, output: nn.Linear, targets: Tensor
    ) -> Tensor:
        """Sum -log p(target) without whole logits, on shards whatever `loss_parallel` is.

        The ranks exchange their log-sum-exps for every chunk of tokens, and at the end the loss.

        Args:
            x: As in `forward`.
            norm: As in `forward`.
            output: As in `forward`.
            targets: Token ids (b, s), replicated.

        Returns:
            A scalar, replicated; backward is the same on every rank.
        """
        weight, part = local(output.weight), WHOLE
        if self.ranks.size > 1:
            part = VocabularyPart(
                self.ranks.rank * weight.shape[0],
                total=lambda own: all_gather(own[None], self.ranks, 0).logsumexp(0),
                add=lambda loss: all_reduce(loss, self.ranks),
            )
        return linear_loss(self.normalized(x, norm), weight, targets, part)

    def normalized(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Return the input of the product, replicated; its gradient is summed over the ranks.

        Raises:
            RuntimeError: For ``scatter``, if the final norm is in another pipeline stage.
        """
        if self.ranks.size == 1:
            return x if norm is None else norm(x)
        if self.stream == "scatter":
            if norm is None:
                raise RuntimeError("tp_head = 'scatter' needs the final norm beside the output")
            gamma, dim = local(norm.weight), norm.normalized_shape[0]
            return scattered_norm(x, gamma, dim, epsilon(norm), self.ranks)
        if self.stream == "tokens":
            x = x if norm is None else normalize(x, norm, self.ranks)
            return gather_partial(x, self.ranks, TOKENS)
        if self.stream == "features":
            x = gather_replicated(x, self.ranks, FEATURES)
        return copy_to_ranks(x if norm is None else normalize(x, norm), self.ranks)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's logits (b, s, V/T)."""
        return F.linear(x, weight)


class TokenEmbedding(nn.Embedding):
    """Token embedding whose look-up is an edge.

    The edge is a child of the embedding, not of the model. A pipeline split therefore keeps both on
    one stage, and FSDP's hooks run before the edge.
    """

    def __init__(self, vocab_size: int, dim: int, embed: nn.Module | None = None) -> None:
        super().__init__(vocab_size, dim)
        self.embed = EmbedEdge() if embed is None else embed

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens (b, s) as (b, s, d); with lanes at full rank as (b, s, G, d)."""
        out: Tensor = self.embed(input, self)
        return out


class OutputProjection(nn.Linear):
    """Output projection that applies the final norm too, through one edge (see above)."""

    def __init__(self, dim: int, vocab_size: int, head: nn.Module | None = None) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.head = HeadEdge() if head is None else head

    def forward(
        self, input: Tensor, norm: nn.RMSNorm | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Turn the residual stream (b, s, d) into logits (b, s, V), or into a loss.

        Args:
            input: The residual stream, in the layout of the edge.
            norm: The final norm.
            targets: Token ids (b, s), for the scalar sum of -log p(target); see `linear_loss`.
        """
        # A call of this module either way, so that FSDP has gathered the weight.
        out: Tensor = (
            self.head(input, norm, self)
            if targets is None
            else cast(HeadEdge, self.head).loss(input, norm, self, targets)
        )
        return out
