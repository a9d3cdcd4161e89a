# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rules: what each makes of Gram matrices.

A linear is W = B A (with σ between them in CoLA) with A (r, d_in) and B (d_out, r). N_A and N_B are
their momenta, in Nesterov's form if the rule wants it. Every update is a momentum times a small
symmetric matrix,

    A ← A − η Q_A N_A        B ← B − η N_B Q_B

and a rule says what Q_A and Q_B (r, r) are. msign(N) is N's polar factor, (N Nᵀ)^(-1/2) N.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.spectral import algebra

_FLOOR = {torch.float32: 100.0, torch.float64: 2.0**26}
"""The least eigenvalue of A Aᵀ that LoRA-Muon resolves, in units of the trace's rounding ε. R then
magnifies the rounding of another Gram matrix to at most 1/_FLOOR of its whitened eigenvalues, which
have that floor. The two, ε · _FLOOR and 1/_FLOOR, are 1e-5 and 1e-2 in fp32, and both 1.5e-8 in
fp64. Public implementations of the paper's Algorithm 4 add 1e-5 of the Frobenius norm."""


class Needs(NamedTuple):
    """What a rule needs of b matrices of one r, summed over the ranks."""

    gram: Tensor  # N Nᵀ (b, r, r)
    weight_gram: Tensor  # W Wᵀ (b, r, r); empty unless the rule needs it
    Wu: Tensor  # W Wᵀu (b, r), likewise; u is W's estimated left singular vector
    square: Tensor  # |Wᵀu|² (b,), likewise


Directions = tuple[Tensor, Tensor | None]
"""Q of b matrices (b, r, r), and the next u (b, r) of a rule that needs it."""


class Rule(ABC):
    """A rule, and what it needs."""

    name: ClassVar[str]  # the value of ``optimizer.name``
    weight_grams: ClassVar[bool] = False  # whether it needs A Aᵀ and Bᵀ B
    weight_norms: ClassVar[bool] = False  # whether it needs the spectral norms of A and B

    @property
    def pairs_only(self) -> bool:
        """Whether it is defined for pairs of factors alone."""
        return ENTRIES[self.name].updates == "factors"

    @property
    def momentum(self) -> str:
        """The momentum's name in a checkpoint."""
        return f"{self.name.lower()}_momentum"

    def needs(self, vectors: Tensor, r: int) -> Needs:
        """Read the vectors (b, ...) of matrices: their `Needs`, of Gram matrices the triangles."""
        triangle = r * (r + 1) // 2
        sizes = (triangle, triangle * self.weight_grams, r * self.weight_norms, self.weight_norms)
        gram, weight_gram, Wu, square = vectors.split(sizes, dim=1)
        weight_gram = algebra.unpacked(weight_gram, r) if self.weight_grams else weight_gram
        return Needs(algebra.unpacked(gram, r), weight_gram, Wu, square.flatten())

    @abstractmethod
    def directions(self, needs: Sequence[Needs], longest: int) -> list[Directions]:
        """Return the directions of b linears of equal shapes, by the `Needs` of all A and all B.

        A rule that takes each matrix alone has one of each, and their longer side.
        """

    def decayed(self, lr: float, weight_decay: float) -> tuple[float, float]:
        """Return the factors of a weight and of its update: W ← (1 − ηλ) W + ΔW."""
        return 1 - lr * weight_decay, 1.0


class Muon(Rule):
    """Muon, on each matrix alone: W ← W − η · 0.2 √max(m, n) · msign(N).

    The factor gives an update the size of AdamW's, whose rates and decay then fit (Moonlight, Liu
    et al., arXiv 2502.16982). The Gram matrix is on the shorter side of (m, n), or on that of r.
    """

    name = "Muon"

    def directions(self, needs: Sequence[Needs], longest: int) -> list[Directions]:
        """Return Q."""
        (each,) = needs
        return [(0.2 * longest**0.5 * algebra.inverse_root(each.gram), None)]


class Spectron(Rule):
    """Spectron (Janson et al., arXiv 2602.12429, Algorithm 1, Eq. 16) bounds the change of W = B A.

        ρ = 1 / (σ_A + σ_B + 1)        A ← A − η ρ msign(N_A)        B ← B − η ρ msign(N_B)

    where σ are the spectral norms. For η ≤ 1 the spectral norm of ΔW is then at most η, up to two
    approximations: the iterations stop at singular values up to 1.2, and σ is estimated from below,
    with an error that the first steps have most of.
    """

    name = "Spectron"
    weight_norms = True

    def directions(self, needs: Sequence[Needs], longest: int) -> list[Directions]:
        """Return Q_A and Q_B, each with the next u."""
        A, B = needs
        sigma_A, u_A = algebra.spectral_norm(A.Wu, A.square)
        sigma_B, u_B = algebra.spectral_norm(B.Wu, B.square)
        rho = (1 / (sigma_A + sigma_B + 1))[:, None, None]
        Q_A, Q_B = rho * algebra.inverse_root(A.gram), rho * algebra.inverse_root(B.gram)
        return [(Q_A, u_A), (Q_B, u_B)]


class LoRAMuon(Rule):
    """LoRA-Muon (Cesista et al., arXiv 2606.12921, Algorithm 1), steepest descent of W = B A.

        R_A = (A Aᵀ)^(-1/2)        A ← A − η/2 · R_B msign(R_B N_A)
        R_B = (Bᵀ B)^(-1/2)        B ← B − η/2 · msign(N_B R_A) R_A

    The first author derives it (leloykun.github.io/ponder/lora-muon-ogd, section 4, where W is
    A Bᵀ). The Gram matrix of R_B N_A is R_B (N_A N_Aᵀ) R_B: nothing else is needed. The change of W
    does not depend on how W is split into A and B. In fp32, singular values of R_B N_A far below a
    tenth of their root mean square move less than the others: the rounding of N_A N_Aᵀ may hide
    them. A factor that is 0, as LoRA's B is at first, leaves the other one as it is.
    """

    name = "LoRAMuon"
    weight_grams = True

    def directions(self, needs: Sequence[Needs], longest: int) -> list[Directions]:
        """Return Q_A and Q_B."""
        A, B = needs
        floor = _FLOOR[A.gram.dtype]
        least = floor * torch.finfo(A.gram.dtype).eps
        R_A = algebra.inverse_root(A.weight_gram, algebra.POLAR_EXPRESS, least)
        R_B = algebra.inverse_root(B.weight_gram, algebra.POLAR_EXPRESS, least)
        rounding = 1 / (floor * A.gram.shape[-1])  # of a whitened Gram matrix, in its trace's units
        Q_A = R_B @ algebra.inverse_root(R_B @ A.gram @ R_B, floor=rounding) @ R_B / 2
        Q_B = R_A @ algebra.inverse_root(R_A @ B.gram @ R_A, floor=rounding) @ R_A / 2
        return [(algebra.symmetric(Q_A), None), (algebra.symmetric(Q_B), None)]

    def decayed(self, lr: float, weight_decay: float) -> tuple[float, float]:
        """Decay W = B A: with s = √(1 − ηλ), A ← s A + ΔA / s, and B likewise."""
        kept = 1 - lr * weight_decay
        return kept**0.5, kept**-0.5


RULES: dict[str, Rule] = {rule.name: rule for rule in (Muon(), Spectron(), LoRAMuon())}
"""The rules by name."""
