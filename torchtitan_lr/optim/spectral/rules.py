# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rules: what each makes of Gram matrices.

A linear is W = B A (with σ between them in CoLA) with A (r, d_in) and B (d_out, r). N_A and N_B are
their momenta, in Nesterov's form if the rule wants it. Every update is a momentum times a small
symmetric matrix,

    A ← A − η Q_A N_A        B ← B − η N_B Q_B

and a rule says what Q_A and Q_B (r, r) are. msign(N) is N's polar factor, (N Nᵀ)^(-1/2) N.

Newton-Schulz iterations only ever multiply N from the left by a polynomial of its Gram matrix
G = N Nᵀ, so a wide N (r, n) enters twice: in G, and in the last product. Everything between is
(r, r). In the usual form, which iterates on N itself, every iteration costs two products of N.

All functions work on matrices of one shape in a batch, and compute in fp32 or, for fp64, in fp64:
G squares the condition number of N. On a GPU products of fp32 may be split (`numerics.sides`). No
function waits for the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan_lr.numerics import plus_product, product, sides
from torchtitan_lr.optim.entries import ENTRIES

Coefficients = Sequence[tuple[float, float, float]]
"""(a, b, c) of the polynomial a x + b x³ + c x⁵ of every iteration."""

QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Muon's five iterations (Jordan et al., 2024; `torch.optim.Muon`'s default). They stop at singular
values from 0.7 to 1.2, which trains as well as 1."""

POLAR_EXPRESS: Coefficients = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
"""Eight iterations that converge for singular values from 1e-3 of the Frobenius norm on (Amsel
et al., arXiv 2505.16932, with their factor 1.01 for rounding)."""

_TINY = 1e-30

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
    def splits(self) -> bool:
        """Whether its products are split where a GPU need not be exact."""
        return ENTRIES[self.name].half_products == "bf16x3"

    @property
    def momentum(self) -> str:
        """The momentum's name in a checkpoint."""
        return f"{self.name.lower()}_momentum"

    def needs(self, vectors: Tensor, r: int) -> Needs:
        """Read the vectors (b, ...) of matrices: their `Needs`, of Gram matrices the triangles."""
        triangle = r * (r + 1) // 2
        sizes = (triangle, triangle * self.weight_grams, r * self.weight_norms, self.weight_norms)
        gram, weight_gram, Wu, square = vectors.split(sizes, dim=1)
        weight_gram = unpacked(weight_gram, r) if self.weight_grams else weight_gram
        return Needs(unpacked(gram, r), weight_gram, Wu, square.flatten())

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
        return [(0.2 * longest**0.5 * inverse_root(each.gram), None)]


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
        sigma_A, u_A = spectral_norm(A.Wu, A.square)
        sigma_B, u_B = spectral_norm(B.Wu, B.square)
        rho = (1 / (sigma_A + sigma_B + 1))[:, None, None]
        Q_A, Q_B = rho * inverse_root(A.gram), rho * inverse_root(B.gram)
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
        R_A = inverse_root(A.weight_gram, POLAR_EXPRESS, least)
        R_B = inverse_root(B.weight_gram, POLAR_EXPRESS, least)
        rounding = 1 / (floor * A.gram.shape[-1])  # of a whitened Gram matrix, in its trace's units
        Q_A = R_B @ inverse_root(R_B @ A.gram @ R_B, floor=rounding) @ R_B / 2
        Q_B = R_A @ inverse_root(R_A @ B.gram @ R_A, floor=rounding) @ R_A / 2
        return [(symmetric(Q_A), None), (symmetric(Q_B), None)]

    def decayed(self, lr: float, weight_decay: float) -> tuple[float, float]:
        """Decay W = B A: with s = √(1 − ηλ), A ← s A + ΔA / s, and B likewise."""
        kept = 1 - lr * weight_decay
        return kept**0.5, kept**-0.5


RULES: dict[str, Rule] = {rule.name: rule for rule in (Muon(), Spectron(), LoRAMuon())}
"""The rules by name."""


def gram(M: Tensor) -> Tensor:
    """Return M Mᵀ (r, r) of M (r, n), in fp32 or wider."""
    return product(*sides(M.to(torch.promote_types(M.dtype, torch.float32))))


def inverse_root(G: Tensor, coefficients: Coefficients = QUINTIC, floor: float = 0.0) -> Tensor:
    """Return G^(-1/2) of symmetric matrices, as far as the iterations converge.

    With G₀ = G / t, Q₀ = I / √t and t = tr G, an iteration is Q ← P Q and G ← P G P, where
    P = a I + b G + c G². All these matrices commute. Q M is then exactly what the usual form of the
    same iterations makes of M / |M|. Both are (b, r, r); Q is 0 for a G that is 0, or overflows.

    ``floor`` is added to the eigenvalues of G, in units of its trace: a rounded G may have negative
    ones, which the iterations would magnify.
    """
    identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]  # (b, 1, 1)
    undefined = (trace <= _TINY) | ~trace.isfinite()
    trace = trace.clamp(min=_TINY)
    G = G / trace + floor * identity
    Q = trace.rsqrt() * identity
    for step, (a, b, c) in enumerate(coefficients):
        left_G, right_G = sides(G, symmetric=True)
        P = a * identity + plus_product(G, left_G, right_G, beta=b, alpha=c)
        left_P, right_P = sides(P, symmetric=True)
        Q = P * trace.rsqrt() if step == 0 else product(left_P, sides(Q, symmetric=True)[1])
        if step < len(coefficients) - 1:
            G = product(sides(product(left_P, right_G))[0], right_P)
    return symmetric(Q).masked_fill(undefined, 0.0)


def symmetric(Q: Tensor) -> Tensor:
    """Return the mean of a matrix and its transpose (b, r, r), which differ by rounding.

    To take one triangle instead would lose up to two digits of Q M.
    """
    return (Q + Q.mT) / 2


def spectral_norm(Wu: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return estimates of spectral norms (b,), from below, and the next left singular vectors.

    They are |W Wᵀu| / |Wᵀu|, and W Wᵀu (b, r) of length 1, where u (b, r) is the estimate before,
    of length 1, and ``square`` is |Wᵀu|² (b,).
    """
    length = torch.linalg.vector_norm(Wu, dim=-1)
    return length * square.clamp(min=_TINY).rsqrt(), Wu / length.clamp(min=_TINY)[:, None]


def packed(G: Tensor) -> Tensor:
    """Return the upper triangles of symmetric matrices (..., r, r): (..., r (r + 1) / 2)."""
    return G.flatten(-2)[..., _upper(G.shape[-1], G.device)]


def unpacked(triangles: Tensor, r: int) -> Tensor:
    """Return the symmetric matrices (b, r, r) whose upper triangles are the rows (b, ...)."""
    upper = triangles.new_zeros(len(triangles), r * r)
    upper[:, _upper(r, triangles.device)] = triangles
    G = upper.view(-1, r, r)
    return G.triu() + G.triu(1).mT


def _upper(r: int, device: torch.device) -> Tensor:
    """Return the places of the upper triangle in a flat (r, r), in the order of its rows."""
    rows, columns = torch.triu_indices(r, r, device=device)
    return rows * r + columns
