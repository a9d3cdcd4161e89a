# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Choice of the next token from its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    The filters apply in this order: temperature, top-k, top-p.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among that many most likely tokens; 0 among all.
        top_p: Sample among the fewest most likely tokens whose probabilities sum to this or more
            (nucleus sampling, Holtzman et al., 2020); 1 among all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the only tokens that can be drawn.

        Args:
            logits: Scores (b, V).

        Returns:
            Their scores (b, n), in descending order, and ids (b, n). Where every token may be drawn
            and the order is of no use, the logits themselves and None.
        """
        size = logits.shape[-1]
        kept = 1 if self.temperature == 0 else self.top_k
        kept = kept if 0 < kept < size else size
        if kept < size or (self.temperature > 0 and self.top_p < 1):
            return logits.topk(kept)
        return logits, None

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw one token per row by inverting the cumulative distribution.

        A row's draw depends on its own number alone, so that it does not change with the batch.

        Args:
            logits: Scores (b, V).
            uniform: One random number in [0, 1) per row (b,), fp64; not read if greedy.

        Returns:
            Token ids (b,).
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits, ids = self.candidates(logits)
        logits = logits.double()
        # The largest is subtracted first: a tiny temperature would make all of them infinite.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        sums = probabilities.cumsum(-1)
        total = sums[:, -1:]
        place = torch.searchsorted(sums, uniform[:, None] * total, right=True)
        last = (sums < total).sum(-1, keepdim=True)  # rounding may give a product of 1 · total
        place = place.minimum(last)
        return (place if ids is None else ids.gather(-1, place)).squeeze(-1)


def draws(seed: int, number: int) -> Tensor:
    """Return the random numbers (n,) of one row, fp64 in [0, 1), on the CPU on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(number, generator=generator, dtype=torch.float64)
