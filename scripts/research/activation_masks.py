# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Masked reductions: CAAT-Net's two baselines (section 5.4), for tests and benchmarks only.

Each of G ranks masks its term of a tensor-parallel sum before sending: only the largest entries of
a token are kept (top-k), or random entries. All ranks receive the sum, so there is one stream, and
one device computes it with the G terms side by side. Backward applies the same mask, the derivative
of the product. Kept entries are not rescaled.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan_lr.models.lanes import lane_terms
from torchtitan_lr.models.llama import LlamaModel

Mask = Literal["top-k", "random"]


class MaskedRowEdge(nn.Module):
    """A row-parallel linear whose ranks mask their terms; replaces `Dense`.

    Args:
        ranks: Number of ranks G.
        kind: Which entries are kept.
        fraction: Share p of each token's entries that is kept.
    """

    def __init__(self, ranks: int, kind: Mask, fraction: float) -> None:
        super().__init__()
        self.ranks, self.kind, self.fraction = ranks, kind, fraction

    def forward(self, x: Tensor, linears: Sequence[Any], norm: Any = None) -> list[Tensor]:
        """Map x (b, s, d_in) to (b, s, d_out) per linear."""
        return [self.reduce(lane_terms(x, linear.weight, self.ranks)) for linear in linears]

    def reduce(self, terms: Tensor) -> Tensor:
        """Mask the terms (b, s, G, d) and return their sum (b, s, d)."""
        return (terms * self.mask(terms)).sum(2)

    def mask(self, terms: Tensor) -> Tensor:
        """Return the mask: ones for kept entries, of the shape of the terms."""
        if self.kind == "random":
            return (torch.rand_like(terms) < self.fraction).to(terms.dtype)
        kept = int(self.fraction * terms.shape[-1])
        places = terms.detach().abs().topk(kept, dim=-1).indices
        return torch.zeros_like(terms).scatter_(-1, places, 1.0)


def mask_reductions(model: LlamaModel, ranks: int, kind: Mask, fraction: float) -> None:
    """Replace the linears after attention and feed-forward of a full-rank model, in place."""
    for block in model.layers.values():
        for name in ("attention.o", "feed_forward.out"):
            group = block.get_submodule(name)
            group.register_module("product", MaskedRowEdge(ranks, kind, fraction))
