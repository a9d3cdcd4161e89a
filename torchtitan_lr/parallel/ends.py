# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Both ends of the model on several ranks: the embedding sharded along d, the head along V."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.collectives import TOKENS, Ranks, local
from torchtitan_lr.models.ends import linear_loss
from torchtitan_lr.parallel.edge import (
    Edge,
    copy_to_ranks,
    gather_from_ranks,
    normalize,
    scatter_to_ranks,
)


class EmbedEdge(Edge):
    """Looks tokens up, for a residual stream that every rank has whole."""

    def __init__(self, ranks: Ranks, comm: str = "all_reduce") -> None:
        super().__init__(ranks)
        self.comm = comm

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look (b, s) up in weight (V, d/T), Shard(1): (b, s, d), for ``sequence`` (b, s/T, d)."""
        x = F.embedding(tokens, local(embedding.weight))  # (b, s, d/T)
        x = gather_from_ranks(x, self.ranks)  # (b, s, d)
        return scatter_to_ranks(x, self.ranks, TOKENS) if self.comm == "sequence" else x


class HeadEdge(Edge):
    """The final norm on all features, then the output projection, weight (V/T, d), Shard(0)."""

    def __init__(self, ranks: Ranks, loss_parallel: bool) -> None:
        super().__init__(ranks)
        self.loss_parallel = loss_parallel

    def forward(
        self, x: Tensor, norm: nn.RMSNorm, output: nn.Linear, targets: Tensor | None = None
    ) -> Tensor:
        """Return logits (b, s, V), or with targets (b, s), replicated, the loss (`linear_loss`)."""
        # With ``loss_parallel`` logits are a DTensor with Shard(-1), for torch's context of that
        # name; else they are gathered, and targets are not used. For the loss the ranks exchange
        # their log-sum-exps for every chunk of tokens, and at the end the loss.
        weight = local(output.weight)
        x = self.normalized(x, norm)
        if targets is not None and self.loss_parallel:
            return linear_loss(x, weight, targets, self.ranks)
        logits = self.logits(x, weight)  # (b, s, V/T)
        if self.loss_parallel:
            mesh = cast(DTensor, output.weight).device_mesh
            return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)
        return gather_from_ranks(logits, self.ranks)

    def normalized(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Return the normalized stream (b, s, d), replicated; its gradient is summed over ranks."""
        # Plans whose residual stream is not replicated override this.
        return copy_to_ranks(normalize(x, norm), self.ranks)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the scores (b, s, V/T) of a normalized stream."""
        return F.linear(x, weight)
