# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Polar factors, inverse square roots and spectral norms, from Gram matrices alone.

The polar factor of M = U S Vᵀ is U Vᵀ = (M Mᵀ)^(-1/2) M. Newton-Schulz iterations only ever
multiply M from the left by a polynomial of its Gram matrix G = M Mᵀ, so a wide M (r, n) enters
twice: in G, and in the last product. Everything between is (r, r). In the usual form, which
iterates on M itself, every iteration costs two products of M.

All functions work on matrices of one shape in a batch, and compute in fp32 or, for fp64, in fp64:
G squares the condition number of M. No function waits for the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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


def gram(M: Tensor) -> Tensor:
    """Return M Mᵀ (r, r) of M (r, n), in fp32 or wider."""
    exact = M.to(torch.promote_types(M.dtype, torch.float32))
    return exact @ exact.mT


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
        P = a * identity + torch.baddbmm(G, G, G, beta=b, alpha=c)
        Q = P * trace.rsqrt() if step == 0 else P @ Q
        if step < len(coefficients) - 1:
            G = P @ G @ P
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
