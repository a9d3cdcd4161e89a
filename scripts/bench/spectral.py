# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Factors for our optimizers to step, and a polar factor alone."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.numerics import product, sides
from torchtitan_lr.optim.spectral.matrices import select_matrices
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.optim.spectral.rules import gram, inverse_root


def polar_factor(M: Tensor) -> Tensor:
    """Return the polar factor of M (r, n) from its Gram matrix, in fp32 or wider; 0 for 0."""
    Q = inverse_root(gram(M)[None])[0]
    return product(sides(Q)[0], sides(M.to(Q.dtype).mT)[1])


Factors = dict[str, nn.Parameter]


def factors_of(flavor: str, layers: int, device: str) -> tuple[Factors, list[tuple[str, str]]]:
    """Return the factors of a CoLA model's blocks with random gradients, and the names of pairs.

    Args:
        flavor: The size.
        layers: Number of blocks; 0 for the flavor's.
        device: Where they are drawn.
    """
    args = FLAVORS["cola"][flavor]
    shapes = model_shapes(replace(args, n_layers=layers or args.n_layers))
    chosen = select_matrices(shapes, "factors")
    factors = {}
    for name in sorted(chosen.names):
        factors[name] = nn.Parameter(torch.randn(shapes[name], device=device) * 0.02)
        factors[name].grad = torch.randn(shapes[name], device=device) * 1e-3
    return factors, list(chosen.pairs)


def our_optimizer(
    rule: str, factors: Factors, pairs: Sequence[tuple[str, str]]
) -> SpectralOptimizer:
    """Build one of our optimizers for the factors."""
    linears = [(factors[a], factors[b]) for a, b in pairs]
    return SpectralOptimizer([*factors.values()], rule, linears, lr=1e-4)
