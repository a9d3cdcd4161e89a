# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Products of rounded factors: bounds against fp64, and sums in fp32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.optim.tsr.test_tsr_optimizer import SETTINGS, build, parameters, step
from torchtitan_lr.optim.tsr.optimizer import lift, multiply, project

F64 = torch.float64
M, N, R = 48, 40, 12
BF16 = 2.0**-8
"""Spacing of bf16 numbers; rounding errs by half of it, relatively."""


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def integers(*size: int, seed: int = 0) -> Tensor:
    """Numbers that bf16 has exactly."""
    return torch.randint(-9, 10, size, generator=torch.Generator().manual_seed(seed)).float()


def core(gradient: Tensor, left: Tensor, right: Tensor | None, precision: str) -> Tensor:
    out = gradient.new_zeros(left.shape[1], N if right is None else right.shape[1])
    project(gradient, left, right, out, precision)
    return out


def test_sums_are_fp32() -> None:
    """Factors that bf16 has exactly: the sums, which it has not, are exact all the same."""
    a, b = integers(M, 500), integers(500, N, seed=1)
    exact = a.to(F64) @ b.to(F64)
    assert torch.equal(multiply(a, b, "bfloat16").to(F64), exact)
    # The control: bf16's own product rounds its sums.
    assert not torch.equal((a.bfloat16() @ b.bfloat16()).to(F64), exact)


@pytest.mark.parametrize("two_sided", [True, False])
def test_errors_are_those_of_rounded_factors(two_sided: bool) -> None:
    gradient, left = draw(M, N), torch.linalg.qr(draw(M, R, seed=1))[0]
    right = torch.linalg.qr(draw(N, R, seed=2))[0] if two_sided else None
    v = torch.eye(N, dtype=F64) if right is None else right.to(F64)
    exact = left.to(F64).T @ gradient.to(F64) @ v
    # Each rounding errs by half a spacing of a term: U, G and, with a second product, UᵀG and V.
    roundings = 4 if two_sided else 2
    terms = left.to(F64).abs().T @ gradient.to(F64).abs() @ v.abs()
    bound = ((1 + BF16 / 2) ** roundings - 1 + 1e-5) * terms
    errors = (core(gradient, left, right, "bfloat16") - exact).abs()
    assert (errors <= bound).all()
    assert errors.norm() < BF16 * exact.norm()
    # The controls: fp32 has no such error, and more bits lost exceed it.
    assert (core(gradient, left, right, "float32") - exact).norm() < 1e-4 * errors.norm()
    coarse = (gradient * 2**-4 + 1).bfloat16().float().sub(1) * 2**4
    assert (core(coarse, left, right, "bfloat16") - exact).norm() > BF16 * exact.norm()

    direction, weight = draw(*exact.shape, seed=3), draw(M, N, seed=4)
    lifted = left.to(F64) @ direction.to(F64) @ v.T
    wanted = 0.9 * weight.to(F64) - 0.5 * lifted
    terms = left.to(F64).abs() @ direction.to(F64).abs() @ v.abs().T
    bound = 0.5 * ((1 + BF16 / 2) ** roundings - 1) * terms + 1e-5 * (terms + weight.abs())
    for precision, exponent in (("bfloat16", 0), ("float32", -6)):
        found = weight.clone()
        lift(direction, left, right, found, torch.tensor(0.9), -0.5, precision)
        assert ((found - wanted).abs() <= bound).all()
        assert (found - wanted).norm() < 2.0**exponent * BF16 * 0.5 * lifted.norm()


def test_a_step_uses_the_precision() -> None:
    """Weights move by almost the same, and not by the same."""
    moved = {}
    for precision in ("float32", "bfloat16"):
        model, optimizer = build(replace(SETTINGS, product_precision=precision))
        before = parameters(model)
        for seed in range(2):
            step(model, optimizer, seeds=(seed,))
        after = parameters(model)
        moved[precision] = torch.cat([(after[n] - before[n]).flatten() for n in before])
    difference = (moved["bfloat16"] - moved["float32"]).norm() / moved["float32"].norm()
    assert 1e-5 < difference < 4 * BF16
