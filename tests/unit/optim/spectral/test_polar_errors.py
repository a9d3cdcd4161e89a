# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The polar factor from a Gram matrix, against the same polynomial of M's singular values."""

import pytest
import torch

from scripts.bench.spectral import UsualMuon, factors_of, our_optimizer
from scripts.research.polar_errors import errors


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
