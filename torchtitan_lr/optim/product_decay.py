# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weight decay of products B A in the place of that of their factors.

The penalty is λ/2 · |BA|² in the Frobenius norm, and not λ/2 · (|A|² + |B|²): Frobenius decay
(Khodak et al., ICLR 2021, arXiv 2105.01029). Its gradients are BᵀB A for A and B A Aᵀ for B. Both
factors take their share at once, apart from the optimizer's update ("decoupled", as in AdamW):

    A ← A − ηλ · (BᵀB) A
    B ← B − ηλ · B (A Aᵀ)

So ranks that split the other sides of A and B sum the Gram matrices A Aᵀ and BᵀB alone, r (r + 1)/2
numbers each, in one message. Ranks that split r gather the factor.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_lr.compat.dtensor import local_part, own_part
from torchtitan_lr.numerics import exact_products, rounded_once
from torchtitan_lr.optim.spectral.algebra import gram, packed, unpacked
from torchtitan_lr.optim.spectral.layout import GramGroups, View, batches
from torchtitan_lr.optim.spectral.selection import factor_pairs
from torchtitan_lr.titan import logger


class Factor(View):
    """A (r, d_in) or B (d_out, r), seen as (r, n).

    Args:
        parameter: The parameter, plain or a DTensor.
        row_dim: The dimension of the parameter that is r: 0 of A, 1 of B.
        group: The parameter's group in its optimizer, whose ``lr`` the schedule changes.
        decay: λ.
    """

    def __init__(
        self, parameter: Tensor, row_dim: int, group: Mapping[str, Any], decay: float
    ) -> None:
        super().__init__(parameter, row_dim)
        self.group, self.decay = group, decay

    def shrink(self, other_gram: Tensor, columns: Tensor) -> None:
        """Update this rank's part, W ← W − ηλ · G W.

        Args:
            other_gram: G (r, r), the other factor's Gram matrix, or 0 to change nothing.
            columns: This rank's columns of W (r, n).
        """
        G = own_part(self.parameter, other_gram, {self.row_dim: 0})  # all, unless ranks split r
        change = G @ columns  # before the weights change, which the columns may be
        with rounded_once([local_part(self.parameter)], self.dtype) as (weight,):
            self.oriented(weight).sub_(change, alpha=float(self.group["lr"]) * self.decay)


class ProductDecay(Optimizer):
    """The decay of all products of a rank, as an optimizer that steps before the others.

    The others shrink no factor themselves; they have the learning rates.

    Args:
        pairs: A and B of every linear.

    Attributes:
        found_inf: 1 if the next step must change nothing, else 0, on the device; None for 0.
    """

    found_inf: Tensor | None = None

    def __init__(self, pairs: Iterable[tuple[Factor, Factor]]) -> None:
        self.pairs = list(pairs)
        self.factors = list(chain.from_iterable(self.pairs))
        super().__init__([factor.parameter for factor in self.factors], {})
        self.groups = GramGroups(factor.layout for factor in self.factors)
        if gathered := sum(bool(factor.layout.rows) for factor in self.factors):
            logger.info("weight_decay_on = 'products' gathers %d factors per step", gathered)

    @classmethod
    def of(
        cls,
        optimizers: Iterable[Optimizer],
        named: Mapping[str, Tensor],
        decays: Mapping[str, float],
    ) -> "ProductDecay":
        """Find the pairs and their learning rates.

        Args:
            optimizers: Those of a rank.
            named: A rank's parameters by name.
            decays: λ by name.
        """
        group_of: dict[Tensor, dict[str, Any]] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group_of |= dict.fromkeys(group["params"], group)
        pairs = []
        for names in factor_pairs(named):
            A, B = (named[name] for name in names)
            of_A, of_B = (decays[name] for name in names)
            pairs.append((Factor(A, 0, group_of[A], of_A), Factor(B, 1, group_of[B], of_B)))
        return cls(pairs)

    def before(self, optimizers: Iterable[Optimizer]) -> None:
        """Shrink all factors unless the optimizers, which step next, are told to leave it out."""
        self.found_inf = getattr(next(iter(optimizers)), "found_inf", None)
        self.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Shrink all factors; no closure is called."""
        rejected = None if self.found_inf is None else self.found_inf > 0
        with exact_products():
            parts = {f: (f.layout, f.exact_part(), f.r) for f in self.factors}
            whole = self.groups.gather_rows(parts)
            columns = {f: f.oriented(part) for f, part in whole.items()}  # (r, n)
            triangle_of: dict[Factor, Tensor] = {}
            for alike in batches(self.factors):
                triangles = packed(torch.stack([gram(columns[f]) for f in alike]))  # (b, ...)
                triangle_of |= zip(alike, triangles, strict=True)
            sums = self.groups.sum_terms({f: (f.layout, triangle_of[f]) for f in self.factors})
            gram_of: dict[Factor, Tensor] = {}
            for alike in batches(self.factors):
                G = unpacked(torch.stack([sums[f] for f in alike]), alike[0].r)  # (b, r, r)
                if rejected is not None:
                    G = G.masked_fill(rejected, 0.0)
                gram_of |= zip(alike, G, strict=True)
            for A, B in self.pairs:
                A.shrink(gram_of[B], columns[A])
                B.shrink(gram_of[A], columns[B])
