# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TF32's error of a core against its bound, and against the error of gradients that bf16 computes.

docs/step.md has the derivation. TF32 keeps 10 bits of a factor's mantissa and adds in fp32;
here the factors are rounded, and the products are fp64.
"""

import pytest
import torch

from tests.unit.tiny import build_tiny, tokens

U = 2.0**-11
RANK = 12


def tf32(x, cut=False):
    bits = x.float().view(torch.int32)
    return ((bits if cut else bits + 2**12) & -(2**13)).view(torch.float32).double()


def bf16(x):
    return x.bfloat16().double()


def core(left, gradient, right, rounded=lambda x: x):
    half = rounded(left).T @ rounded(gradient)  # as `MatrixStack.project` multiplies
    return rounded(half) @ rounded(right)


def matrix_gradients(dtype):
    model = build_tiny("full", torch.float64).to(dtype)
    batch = tokens(model.model_args, 8, 32)
    (model(batch, targets=batch) / batch.numel()).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.ndim == 2}


@pytest.fixture(scope="module")
def cores():
    """By matrix: bases and gradient in fp64, the norm of their core, and of bf16's error of it."""
    found = []
    of_bf16 = matrix_gradients(torch.bfloat16)
    for name, gradient in matrix_gradients(torch.float64).items():
        left, values, right = torch.linalg.svd(gradient)
        left, right = left[:, :RANK], right[:RANK].T
        exact = core(left, gradient, right)
        error = (core(left, of_bf16[name], right) - exact).norm()
        found.append((left, gradient, right, exact, values[0], error))
    assert len(found) == 23
    return found


def test_the_bound_holds(cores):
    for left, gradient, right, exact, largest, _ in cores:
        bound = 2 * (gradient.norm() + RANK**0.5 * largest)
        error = (core(left, gradient, right, tf32) - exact).norm()
        assert 0 < error < U * bound
        cut = (core(left, gradient, right, lambda x: tf32(x, cut=True)) - exact).norm()
        assert error < cut < 2 * U * bound
        # The control: bf16 would not stay below.
        assert (core(left, gradient, right, bf16) - exact).norm() > 4 * error


def test_bf16_gradients_have_a_larger_error(cores):
    for left, gradient, right, exact, _, of_bf16 in cores:
        error = (core(left, gradient, right, tf32) - exact).norm()
        assert error < 3e-4 * exact.norm()
        assert 5 * error < of_bf16
        # Cut factors are all a little smaller: of this Adam removes the common scale.
        cut = core(left, gradient, right, lambda x: tf32(x, cut=True))
        scaled = cut * (cut * exact).sum() / cut.square().sum()
        assert 4 * (scaled - exact).norm() < of_bf16


def test_bases_stay_orthonormal():
    """U = QŨ of two orthonormal factors."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator)  # noqa: E731
    outer, inner = torch.linalg.qr(draw(400, 37))[0], torch.linalg.qr(draw(37, 37))[0][:, :32]
    for rounded, least, most in ((tf32, 0.0, 2 * U), (bf16, 2 * U, 16 * U)):
        basis = rounded(outer) @ rounded(inner)
        error = (basis.T @ basis - torch.eye(32)).abs().max()
        assert least < error < most
