# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rules: what each makes of Gram matrices.

A linear is W = B A (with σ between them in CoLA) with A (r, d_in) and B (d_out, r). N_A and N_B are
their momenta, in Nesterov's form if the rule wants it. Every update is a momentum times a small
symmetric matrix,

    A ← A − η Q_A N_A        B ← B − η N_B Q_B

and a rule says what Q_A and Q_B (r, r) are. msign(N) is N's polar factor, (N Nᵀ)^(-1/2) N. All
arguments are batches over linears of one rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_lr.optim.spectral.algebra import POLAR_EXPRESS, inverse_root, symmetric

_FLOOR = {torch.float32: 100.0, torch.float64: 2.0**26}
"""The least eigenvalue of A Aᵀ that LoRA-Muon resolves, in units of the trace's rounding ε. R then
magnifies the rounding of another Gram matrix to at most 1/_FLOOR of its whitened eigenvalues, which
have that floor. The two, ε · _FLOOR and 1/_FLOOR, are 1e-5 and 1e-2 in fp32, and both 1.5e-8 in
fp64. Public implementations of the paper's Algorithm 4 add 1e-5 of the Frobenius norm."""


@dataclass(frozen=True)
class Rule:
    """A rule's name, and what it needs.

    Args:
        name: The value of ``optimizer.name``.
        pairs_only: Whether it is defined for pairs of factors alone.
        weight_grams: Whether it needs A Aᵀ and Bᵀ B.
        weight_norms: Whether it needs the spectral norms of A and B.
    """

    name: str
    pairs_only: bool = True
    weight_grams: bool = False
    weight_norms: bool = False

    @property
    def momentum(self) -> str:
        """Return the momentum's name in a checkpoint, by which its rule is known."""
        return f"{self.name.lower()}_momentum"


MUON = Rule("Muon", pairs_only=False)
SPECTRON = Rule("Spectron", weight_norms=True)
LORA_MUON = Rule("LoRAMuon", weight_grams=True)
RULES = {rule.name: rule for rule in (MUON, SPECTRON, LORA_MUON)}
"""The rules by name."""


def muon(grams: Tensor, longest: int) -> Tensor:
    """Muon, on each matrix alone: W ← W − η · 0.2 √max(m, n) · msign(N).

    The factor gives an update the size of AdamW's, whose rates and decay then fit (Moonlight, Liu
    et al., arXiv 2502.16982).

    Args:
        grams: N Nᵀ of matrices (m, n), on their shorter side or that of r: (b, r, r).
        longest: max(m, n).

    Returns:
        Q (b, r, r).
    """
    return 0.2 * longest**0.5 * inverse_root(grams)


def spectron(
    gram_A: Tensor, gram_B: Tensor, sigma_A: Tensor, sigma_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Spectron (Janson et al., arXiv 2602.12429, Algorithm 1, Eq. 16) bounds the change of W = B A.

        ρ = 1 / (σ_A + σ_B + 1)        A ← A − η ρ msign(N_A)        B ← B − η ρ msign(N_B)

    where σ are the spectral norms. For η ≤ 1 the spectral norm of ΔW is then at most η, up to two
    approximations: the iterations stop at singular values up to 1.2, and σ is estimated from below,
    with an error that the first steps have most of.

    Args:
        gram_A: N_A N_Aᵀ (b, r, r).
        gram_B: N_Bᵀ N_B (b, r, r).
        sigma_A: Spectral norms of A (b,).
        sigma_B: Those of B (b,).

    Returns:
        Q_A and Q_B (b, r, r).
    """
    rho = (1 / (sigma_A + sigma_B + 1))[:, None, None]
    return rho * inverse_root(gram_A), rho * inverse_root(gram_B)


def lora_muon(gram_A: Tensor, gram_B: Tensor, AAt: Tensor, BtB: Tensor) -> tuple[Tensor, Tensor]:
    """LoRA-Muon (Cesista et al., arXiv 2606.12921, Algorithm 1), steepest descent of W = B A.

        R_A = (A Aᵀ)^(-1/2)        A ← A − η/2 · R_B msign(R_B N_A)
        R_B = (Bᵀ B)^(-1/2)        B ← B − η/2 · msign(N_B R_A) R_A

    The first author derives it (leloykun.github.io/ponder/lora-muon-ogd, section 4, where W is
    A Bᵀ). The Gram matrix of R_B N_A is R_B (N_A N_Aᵀ) R_B: nothing else is needed. The change of W
    does not depend on how W is split into A and B. In fp32, singular values of R_B N_A far below a
    tenth of their root mean square move less than the others: the rounding of N_A N_Aᵀ may hide
    them. A factor that is 0, as LoRA's B is at first, leaves the other one as it is.

    Args:
        gram_A: N_A N_Aᵀ (b, r, r).
        gram_B: N_Bᵀ N_B (b, r, r).
        AAt: A Aᵀ (b, r, r).
        BtB: Bᵀ B (b, r, r).

    Returns:
        Q_A and Q_B (b, r, r).
    """
    floor = _FLOOR[AAt.dtype]
    least = floor * torch.finfo(AAt.dtype).eps
    R_A = inverse_root(AAt, POLAR_EXPRESS, least)
    R_B = inverse_root(BtB, POLAR_EXPRESS, least)
    rounding = 1 / (floor * AAt.shape[-1])  # of a whitened Gram matrix, in units of its trace
    Q_A = R_B @ inverse_root(R_B @ gram_A @ R_B, floor=rounding) @ R_B / 2
    Q_B = R_A @ inverse_root(R_A @ gram_B @ R_A, floor=rounding) @ R_A / 2
    return symmetric(Q_A), symmetric(Q_B)


def decayed(rule: Rule, lr: float, weight_decay: float) -> tuple[float, float]:
    """Return the factors of a weight and of its update in a step with decay λ (`weight_decay`).

    W ← (1 − ηλ) W + ΔW for a matrix. Under LoRA-Muon, the decay is that of W = B A: with
    s = √(1 − ηλ), A ← s A + ΔA / s, and B likewise.
    """
    kept = 1 - lr * weight_decay
    if rule is LORA_MUON:
        return kept**0.5, kept**-0.5
    return kept, 1.0
