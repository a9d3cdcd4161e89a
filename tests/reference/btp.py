# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BTP in plain code: a CoLA block as T ranks compute it, one rank after the other, in one process.

A list has one entry per rank: its part of the stream, or of a weight (BOOST, sections 3 and 4).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = list[Tensor]


@dataclass
class PlainBTP:
    """A block's weights, A (r, d_in) and B (d_out, r), and what its ranks sent; σ is SiLU."""

    weights: dict[str, Tensor]
    ranks: int
    heads: int
    eps: float
    rotate: Callable[[Tensor], Tensor]  # rotary positions of (b, s, h, head_dim)
    sent: list[tuple[int, ...]] = field(default_factory=list)

    def all_reduce(self, terms: Parts) -> Tensor:
        """Every rank gets the sum: here there is one copy of it."""
        self.sent.append(tuple(terms[0].shape))
        return torch.stack(terms).sum(0)

    def columns(self, name: str) -> Parts:
        """A is split along d_in, as its input is."""
        return list(self.weights[f"{name}.A.weight"].chunk(self.ranks, 1))

    def rows(self, name: str) -> Parts:
        """B is split along d_out: each rank computes features of its own."""
        return list(self.weights[f"{name}.B.weight"].chunk(self.ranks, 0))

    def normalized_down(self, x: Parts, norm: str, names: list[str]) -> list[Tensor]:
        """Online RMSNorm: products and Σx² travel together, and the quotient is r wide."""
        gammas = self.weights[f"{norm}.weight"].chunk(self.ranks)
        terms = []
        for rank, (part, gamma) in enumerate(zip(x, gammas, strict=True)):
            A = torch.cat([self.columns(name)[rank] for name in names])  # (Σ r, d/T), grouped
            square = part.square().sum(-1, keepdim=True)  # (b, s, 1)
            terms.append(torch.cat([(part * gamma) @ A.mT, square], -1))
        both = self.all_reduce(terms)  # (b, s, Σ r + 1)
        d = self.ranks * x[0].shape[-1]
        rstd = torch.rsqrt(both[..., -1:] / d + self.eps)
        widths = [self.columns(name)[0].shape[0] for name in names]
        return list((both[..., :-1] * rstd).split(widths, -1))

    def down(self, x: Parts, name: str) -> Tensor:
        """A x (b, s, r) of what a group has computed."""
        parts = zip(x, self.columns(name), strict=True)
        return self.all_reduce([part @ A.mT for part, A in parts])

    def up(self, latent: Tensor, name: str) -> Parts:
        """B σ(h), without a message: every rank has the whole latent."""
        h = F.silu(latent)
        return [h @ B.mT for B in self.rows(name)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of one rank's heads, (b, s, d/T) each."""
        q, k, v = (x.unflatten(-1, (self.heads // self.ranks, -1)) for x in (q, k, v))
        q, k = self.rotate(q), self.rotate(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h/T, s, head_dim)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    def block(self, x: Parts) -> Parts:
        """Return the ranks' parts (b, s, d/T) of the stream behind the block."""
        names = [f"attention.{name}" for name in ("wq", "wk", "wv")]
        latents = self.normalized_down(x, "attention_norm", names)
        q, k, v = (self.up(h, name) for h, name in zip(latents, names, strict=True))
        heads = [self.attend(*own) for own in zip(q, k, v, strict=True)]
        update = self.up(self.down(heads, "attention.wo"), "attention.wo")
        x = [part + own for part, own in zip(x, update, strict=True)]

        names = ["feed_forward.w1", "feed_forward.w3"]
        latents = self.normalized_down(x, "ffn_norm", names)
        gate, up = (self.up(h, name) for h, name in zip(latents, names, strict=True))
        hidden = [F.silu(g) * u for g, u in zip(gate, up, strict=True)]
        update = self.up(self.down(hidden, "feed_forward.w2"), "feed_forward.w2")
        return [part + own for part, own in zip(x, update, strict=True)]
