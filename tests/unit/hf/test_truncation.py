# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Truncated SVD against the formulas as the papers state them."""

import pytest
import torch

from torchtitan_lr.hf.truncation import truncate


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uneven(n, d):
    """Inputs (n, d) whose directions differ a hundredfold in size."""
    return (
        draw(n, d, seed=1)
        @ torch.diag(torch.logspace(0, -2, d, dtype=torch.float64))
        @ draw(d, d, seed=2)
    )


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_the_plain_error_is_the_tail_of_the_singular_values(shape):
    weight = draw(*shape)
    found = truncate(weight, 5)
    sizes = torch.linalg.svdvals(weight)
    tail = (sizes[5:].square().sum() / sizes.square().sum()).sqrt()
    assert abs(found.error - tail) < 1e-13 and found.weighted_error is None
    assert found.A.shape == (5, shape[1]) and found.B.shape == (shape[0], 5)
    assert torch.allclose(found.A @ found.A.T, found.B.T @ found.B, atol=1e-12)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_whitening_is_svd_llms_formula(shape):
    weight, inputs = draw(*shape), uneven(300, shape[1])
    moments = inputs.T @ inputs
    found = truncate(weight, 5, moments)
    # Wang et al. (2024), section 3.1: S of Cholesky, W' = U_r Σ_r V_rᵀ S⁻¹.
    root = torch.linalg.cholesky(moments)
    left, sizes, right = torch.linalg.svd(weight @ root, full_matrices=False)
    paper = (left[:, :5] * sizes[:5]) @ torch.linalg.solve_triangular(
        root, right[:5], upper=False, left=False
    )
    assert ((found.B @ found.A - paper).norm() / paper.norm()) < 1e-6
    outputs = weight @ inputs.T
    lost = ((weight - found.B @ found.A) @ inputs.T).norm() / outputs.norm()
    assert abs(found.weighted_error - lost) < 1e-6
    tail = (sizes[5:].square().sum() / sizes.square().sum()).sqrt()
    assert abs(lost - tail) < 1e-6
    plain = truncate(weight, 5)
    worse = ((weight - plain.B @ plain.A) @ inputs.T).norm() / outputs.norm()
    assert worse > 1.3 * lost and found.error > plain.error


def test_a_rank_above_a_narrow_side_loses_nothing_and_trains():
    weight = draw(6, 16)
    found = truncate(weight, 10, seed=3)
    assert found.error < 1e-14
    assert (found.B @ found.A - weight).abs().max() < 1e-13
    A, B = found.A.requires_grad_(), found.B.requires_grad_()
    (B @ A).square().sum().backward()
    assert found.A.shape == (10, 16) and (B.grad[:, 6:].norm(dim=0) > 0.1).all()
