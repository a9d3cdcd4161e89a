# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Arithmetic intensity of the feed-forward's products under tensor parallelism (BOOST, Table 7).

An (m, k) by (k, n) product costs 2mnk FLOPs and moves at least mk + kn + mn elements (BOOST,
Eq. 1). As in the paper, the formulas list one rank's forward products of the up and down
projections. The paper omits LLaMA's gate, which has the same shape and intensity as up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.registry import FORMULAS


@dataclass(frozen=True)
class Product:
    """A product of an (m, k) by a (k, n) matrix."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Multiplications and additions: 2mnk."""
        return 2 * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements read and written, each once: mk + kn + mn."""
        return self.m * self.k + self.k * self.n + self.m * self.n


def feed_forward_products(
    shape: ModelShape, plan: str, tp_degree: int, tokens: int
) -> list[Product]:
    """Return one rank's products in one forward pass of the feed-forward.

    Args:
        shape: Shape and family of the model; full-rank or low-rank to match the plan.
        plan: The plan's name.
        tp_degree: Ranks T.
        tokens: Tokens n = b·s of a micro-batch.
    """
    d, f, t = shape.dim, shape.ffn_dim, tp_degree
    formula = FORMULAS[plan]
    if not formula.low_rank:
        return [Product(tokens, d, f // t), Product(tokens, f // t, d)]
    r = shape.rank_ffn
    weights = [*formula.factors(d, f, r, t), *formula.factors(f, d, r, t)]
    return [Product(tokens, width_in, width_out) for width_out, width_in in weights]


def arithmetic_intensity(products: Iterable[Product], element_size: int = 2) -> float:
    """Return the FLOPs per byte moved, over all products together.

    Args:
        products: At least one product.
        element_size: Bytes per element; 2 for bf16.
    """
    products = list(products)
    moved = element_size * sum(product.elements for product in products)
    return sum(product.flops for product in products) / moved
