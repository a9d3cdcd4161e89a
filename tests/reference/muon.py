# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Muon on factors in plain code: whole matrices, one at a time, five iterations on each."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Of the polynomial a x + b x³ + c x⁵ of an iteration (Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def usual_polar_factor(M: Tensor) -> Tensor:
    """Return what five iterations on M (m, n) make of it, in M's dtype: nearly U Vᵀ."""
    X = M.mT if M.shape[0] > M.shape[1] else M  # (r, n)
    X = X / X.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        G = X @ X.mT  # (r, r)
        X = a * X + (b * G + c * G @ G) @ X
    return X.mT if M.shape[0] > M.shape[1] else X


class UsualMuon(torch.optim.Optimizer):
    """Muon with Moonlight's scale, on each factor A (r, d_in) and B (d_out, r)."""

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = usual_polar_factor(state["momentum"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)
