# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The two ends of the model under tensor parallelism: embedding, and final norm with head.

The embedding is sharded along d in every plan, the head along the vocabulary. A row-parallel head
would all-reduce logits and is not supported.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.models.head_loss import VocabularyPart, linear_loss
from torchtitan_lr.parallel.tensor.collectives import (
    FEATURES,
    TOKENS,
    Ranks,
    all_gather,
    cast,
    copy_to_ranks,
    gather_partial,
    gather_replicated,
    split_replicated,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from torchtitan_lr.parallel.tensor.online_norm import sum_of_squares
from torchtitan_lr.parallel.tensor.styles import (
    Edge,
    epsilon,
    local,
    replicated_norm,
    token_sharded_norm,
)


class ShardedEmbedEdge(Edge):
    """Look up a shard of the features, without a collective (BTP)."""

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1); gives (b, s, d/T), Shard(-1)."""
        return F.embedding(tokens, local(embedding.weight))


class GatheredEmbedEdge(Edge):
    """Look up a shard of the features, then gather all features on every rank.

    Args:
        ranks: The tensor-parallel ranks.
        sequence: Whether each rank then keeps only its shard of the tokens.
    """

    def __init__(self, ranks: Ranks, sequence: bool = False) -> None:
        super().__init__(ranks)
        self.sequence = sequence

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d/T), Shard(1).

        Returns:
            Tensor (b, s, d), replicated; (b, s/T, d), Shard(1), for `sequence`.
        """
        x = F.embedding(tokens, local(embedding.weight))
        x = gather_replicated(x, self.ranks, FEATURES)
        return split_replicated(x, self.ranks, TOKENS) if self.sequence else x


class VocabParallelHead(nn.Module):
    """Final norm on all features, then a head that is sharded along the vocabulary.

    Args:
        mesh: The tensor-parallel mesh.
        loss_parallel: Whether logits stay sharded, as a DTensor for torch's ``loss_parallel``
            context, or are gathered.
        stream: Layout of the residual stream: ``replicated`` (b, s, d), ``features``
            (b, s, d/T), Shard(-1), or ``tokens`` (b, s/T, d), Shard(1).
    """

    def __init__(self, mesh: DeviceMesh, loss_parallel: bool, stream: str = "replicated") -> None:
        super().__init__()
        self.mesh, self.ranks = mesh, Ranks.of(mesh)
        self.stream, self.loss_parallel = stream, loss_parallel

    def forward(self, x: Tensor, norm: nn.RMSNorm | None, output: nn.Linear) -> Tensor:
        """Compute logits.

        Args:
            x: The residual stream, in the layout `stream`.
            norm: The final norm; weight (d,), Replicate.
            output: The head; weight (V/T, d), Shard(0).

        Returns:
            Logits (b, s, V): a DTensor with Shard(-1), or a plain replicated tensor.
        """
        return self.finish(F.linear(self.normalized(x, norm), local(output.weight)))

    def loss(
        self, x: Tensor, norm: nn.RMSNorm | None, output: nn.Linear, targets: Tensor
    ) -> Tensor:
        """Sum -log p(target) without whole logits, on shards whatever `loss_parallel` is.

        Args:
            x: As in `forward`.
            norm: As in `forward`.
            output: As in `forward`.
            targets: Token ids (b, s), replicated.

        Returns:
            A scalar, replicated; backward is the same on every rank.
        """
        weight = local(output.weight)
        part = vocabulary_part(self.ranks, weight.shape[0])
        return linear_loss(self.normalized(x, norm), weight, targets, part)

    def normalized(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Return the input of the product, replicated; its gradient is summed over the ranks."""
        if self.stream == "tokens":
            x = x if norm is None else token_sharded_norm(x, norm, self.ranks)
            return gather_partial(x, self.ranks, TOKENS)
        if self.stream == "features":
            x = gather_replicated(x, self.ranks, FEATURES)
        x = x if norm is None else replicated_norm(x, norm)
        return copy_to_ranks(x, self.ranks)

    def finish(self, logits: Tensor) -> Tensor:
        """Return shards of the logits (b, s, V/T) in the form of the loss."""
        if self.loss_parallel:
            return DTensor.from_local(logits, self.mesh, [Shard(-1)], run_check=False)
        return gather_replicated(logits, self.ranks, FEATURES)


class ScatterHead(VocabParallelHead):
    """The head of a feature-sharded stream with a cheaper backward: each rank needs a part of dx.

    γ ⊙ x is gathered and then scaled by rstd, so the gathered tensor's gradient can be
    reduce-scattered at once instead of all-reduced and sliced. The final norm's weight is Shard(0).
    """

    def __init__(self, mesh: DeviceMesh, loss_parallel: bool) -> None:
        super().__init__(mesh, loss_parallel, "features")

    def normalized(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Return the normalized stream (b, s, d), replicated, of x (b, s, d/T), Shard(-1).

        Raises:
            RuntimeError: If the final norm is in another pipeline stage.
        """
        if norm is None:
            raise RuntimeError("tp_head = 'scatter' needs the final norm beside the output")
        return scattered_norm(
            x, local(norm.weight), norm.normalized_shape[0], epsilon(norm), self.ranks
        )


def scattered_norm(x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:
    """Normalize a feature-sharded stream, and gather the result for vocabulary shards.

    Args:
        x: Residual stream (b, s, d/T), Shard(-1).
        gamma: The norm's weight (d/T,), Shard(0).
        dim: d.
        eps: ε.
        ranks: The tensor-parallel ranks.

    Returns:
        Tensor (b, s, d), replicated; its gradient is summed over the ranks.
    """
    out: Tensor = _ScatteredNorm.apply(x, gamma, dim, eps, ranks)
    return out


def vocabulary_part(ranks: Ranks, rows: int) -> VocabularyPart:
    """Return a rank's part of the vocabulary, of which every rank has ``rows`` rows.

    The exchange per chunk of tokens is the ranks' log-sum-exps, gathered; at the end the loss.
    """

    def total(own: Tensor) -> Tensor:
        return all_gather(own[None], ranks, 0).logsumexp(0)

    def add(loss: Tensor) -> Tensor:
        return wait(start_all_reduce(loss, ranks))

    return VocabularyPart(ranks.rank * rows, total, add)


class _ScatteredNorm(torch.autograd.Function):
    """Forward all-gather and statistic's all-reduce, backward reduce-scatter and all-reduce.

    H = U · rstd with U the gathered γ ⊙ x. The gradient of rstd is <U, dH> over the features, of
    which a rank sums its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:
        started = start_all_reduce(sum_of_squares(x), ranks)
        gathered = all_gather(x * gamma, ranks, FEATURES)
        rstd = torch.rsqrt(wait(started) / dim + eps).unsqueeze(-1)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.dim, ctx.ranks = dim, ranks
        return cast(gathered * rstd, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        dgathered = (gradient * rstd).to(x.dtype)
        du = wait(start_reduce_scatter(dgathered, ctx.ranks, FEATURES)).to(rstd.dtype)
        # dS = -½ rstd² / d · <dH, H>, and <dH, H> = <dU, U>.
        inner = wait(start_all_reduce((du * (x * gamma)).sum(-1), ctx.ranks)).unsqueeze(-1)
        ds = -0.5 / ctx.dim * rstd.square() * inner
        dx = du * gamma + 2 * ds * x
        dgamma = (du * x).sum((0, 1))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), None, None, None
