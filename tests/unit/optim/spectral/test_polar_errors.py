# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The polar factor from a Gram matrix, against the same polynomial of M's singular values."""

import pytest
import torch
from torch import Tensor

from scripts.bench.spectral import factors_of, our_optimizer, polar_factor
from tests.reference.muon import UsualMuon, usual_polar_factor
from torchtitan_lr.optim.spectral.algebra import QUINTIC, inverse_root

SHAPE = (128, 1376)


def matrix(condition: float, dtype: torch.dtype) -> Tensor:
    """Return M (r, n) with random singular vectors, rounded to a dtype."""
    r, n = SHAPE
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(r, r, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(n, r, generator=generator, dtype=torch.float64))
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), r, dtype=torch.float64)
    return (left * values @ right.mT).to(dtype)


def all_in(dtype: torch.dtype, M: Tensor) -> Tensor:
    """Return the Gram form's result with G and Q in a dtype."""
    G = (M.to(dtype) @ M.to(dtype).mT)[None]
    return inverse_root(G)[0] @ M.to(dtype)


def errors(condition: float, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of one row of the table, by their names."""
    M = matrix(condition, dtype)
    U, values, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    expected = values / values.norm()
    for a, b, c in QUINTIC:
        expected = a * expected + b * expected**3 + c * expected**5
    polynomial, exact = U * expected @ Vh, U @ Vh
    ours, usual = polar_factor(M), usual_polar_factor(M.float())
    control = all_in(torch.bfloat16, M)

    def error(found: Tensor, wanted: Tensor) -> float:
        return torch.linalg.matrix_norm(found.double() - wanted, 2).item()

    return {
        "to the polynomial": error(ours, polynomial),
        "usual": error(usual, polynomial),
        "all bf16": error(control, polynomial),
        "to U Vᵀ": error(ours, exact),
        "usual, to U Vᵀ": error(usual, exact),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
def test_errors_over_condition_numbers(condition: float, dtype: torch.dtype) -> None:
    found = errors(condition, dtype)
    assert found["to the polynomial"] < 1e-3
    # What is left to U Vᵀ is the iterations' own: as much as in the usual form.
    assert found["to U Vᵀ"] == pytest.approx(found["usual, to U Vᵀ"], abs=1e-3)
    # The control: with G and Q in bf16 the error is that of the signal.
    assert found["all bf16"] > 10 * found["to the polynomial"]
    assert found["all bf16"] > 1 or condition < 1e2


def test_the_bench_compares_two_forms_of_one_optimizer() -> None:
    torch.manual_seed(0)
    factors, pairs = factors_of("debug", layers=1, device="cpu")
    usual = {name: torch.nn.Parameter(p.detach().clone()) for name, p in factors.items()}
    before = {name: p.detach().clone() for name, p in factors.items()}
    optimizers = [our_optimizer("Muon", factors, pairs), UsualMuon([*usual.values()], lr=1e-4)]
    for step in range(3):
        for name, p in factors.items():
            p.grad = usual[name].grad = torch.randn_like(p) * 10**step
        for optimizer in optimizers:
            optimizer.step()
    for name, p in factors.items():
        moved = (p - before[name]).norm()
        assert (p - usual[name]).norm() < 1e-3 * moved
