# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Muon by its usual five iterations, what ours is measured against, and factors to step."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.optim.spectral.algebra import QUINTIC, gram, inverse_root
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.optim.spectral.selection import select_matrices

USUAL = "usual, fp32"


def polar_factor(M: Tensor) -> Tensor:
    """Return the polar factor of M (r, n) from its Gram matrix, in fp32 or wider; 0 for 0."""
    Q = inverse_root(gram(M)[None])[0]
    return Q @ M.to(Q.dtype)


def usual_polar_factor(M: Tensor) -> Tensor:
    """Return what Muon's five iterations on M itself make of it, in M's dtype.

    Args:
        M: (m, n); the iterations run on the wide one of M and its transpose.
    """
    X = M.mT if M.shape[0] > M.shape[1] else M  # (r, n)
    X = X / X.norm()
    for a, b, c in QUINTIC:
        G = X @ X.mT  # (r, r)
        X = a * X + (b * G + c * G @ G) @ X
    return X.mT if M.shape[0] > M.shape[1] else X


class UsualMuon(torch.optim.Optimizer):
    """Muon with Moonlight's scale, by `usual_polar_factor`: what ours is measured against."""

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices, one after the other."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = usual_polar_factor(state["momentum"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


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
