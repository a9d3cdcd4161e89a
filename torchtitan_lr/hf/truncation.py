# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replace a dense matrix by two factors: its truncated SVD, plain or weighted by its inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-8
"""Added to the diagonal of the second moments, in units of its mean: it orders the directions that
the calibration text never uses."""


@dataclass(frozen=True)
class Truncation:
    """Factors of a matrix W ≈ B A."""

    A: Tensor
    """(r, d_in)"""
    B: Tensor
    """(d_out, r)"""
    error: float
    """|W - B A| / |W|, Frobenius norms."""
    weighted_error: float | None
    """|(W - B A) X| / |W X| over the calibration inputs X; None without them."""


def truncate(weight: Tensor, rank: int, moments: Tensor | None = None, seed: int = 0) -> Truncation:
    """Compute the best factors of rank r, in fp64.

    Plain, they minimise |W - B A|: the truncated SVD (Eckart-Young). With the second moments C =
    X Xᵀ of the inputs X they minimise |(W - B A) X|: with any S such that S Sᵀ = C and W S =
    U Σ Vᵀ, B A = U_r Σ_r V_rᵀ S⁻¹ (SVD-LLM, Wang et al., 2024, section 3.1, whose S is Cholesky's).
    It is computed as B A = U_r U_rᵀ W, the same matrix, for which S need not have an inverse, and S
    is C's root by eigenvectors.

    Both factors then get the root of B A's singular values: A Aᵀ = Bᵀ B.

    Above the smaller side of W, surplus rows of A are random, of the size of the others, and
    surplus columns of B zero: B A does not change, and both train.

    Args:
        weight: W (d_out, d_in).
        rank: Rank r.
        moments: C (d_in, d_in), up to a factor; None for the plain SVD.
        seed: Seed of the surplus rows.
    """
    weight = weight.double()
    root = None
    if moments is not None:  # S with S Sᵀ = C plus the ridge
        values, vectors = torch.linalg.eigh(moments.double())
        ridge = RIDGE * moments.double().diagonal().mean()
        root = vectors * (values.clamp(min=0) + ridge).sqrt()
    used = min(rank, *weight.shape)
    left = torch.linalg.svd(weight if root is None else weight @ root, full_matrices=False)[0]
    left = left[:, :used]
    inner, sizes, right = torch.linalg.svd(left.T @ weight, full_matrices=False)
    scale = sizes.sqrt()
    A, B = scale[:, None] * right, (left @ inner) * scale
    difference = weight - B @ A
    error = _ratio(difference, weight)
    weighted = None if root is None else _ratio(difference @ root, weight @ root)
    if rank > used:
        generator, more = torch.Generator().manual_seed(seed), rank - used
        rows = torch.randn(more, A.shape[1], generator=generator, dtype=A.dtype).to(A.device)
        A, B = torch.cat([A, rows * A.std()]), torch.cat([B, B.new_zeros(B.shape[0], more)], dim=1)
    return Truncation(A, B, error, weighted)


def _ratio(difference: Tensor, whole: Tensor) -> float:
    """Return |difference| / |whole|, 0 for a zero matrix."""
    size = float(whole.norm())
    return float(difference.norm()) / size if size else 0.0
