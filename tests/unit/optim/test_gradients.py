# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norm and clipping of stored gradients; in layouts: tests/distributed."""

import pytest
import torch
from torch import nn

from torchtitan_lr.optim.gradients import StoredGradients


@pytest.fixture
def parts():
    """Two parts of a model: gradients of norms 3 and 4, and one parameter without."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(2, 2)
    first.weight.grad = torch.ones(3, 3)
    second.weight.grad = torch.full((2, 2), 2.0)
    return [first, second]


def test_bf16_gradients_are_clipped_as_fp64_ones():
    """Neither the norm nor the factor is rounded to bf16."""
    model = nn.Linear(200, 50, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = model.weight.grad.double()
    gradients = StoredGradients([model], None)
    norm = gradients.finish_sums().sqrt()
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-12)
    gradients.clip(exact.norm().item() / 393_728, norm)  # bf16 rounds this factor by 0.24%
    scale = (model.weight.grad.double() * exact).sum() / exact.square().sum()
    assert scale.item() * 393_728 == pytest.approx(1, abs=1e-3)  # products: 6e-4


def test_what_is_not_finite_is_named(parts):
    gradients = StoredGradients(parts, None)
    assert gradients.nonfinite(parts[1]) == []
    parts[1].weight.grad[1, 0] = float("inf")
    assert gradients.nonfinite(parts[1]) == ["weight"]
    assert not torch.isfinite(gradients.finish_sums())
    # Clipping leaves the others as they are, so that the culprit can be named after it.
    gradients.clip(1.0, gradients.finish_sums().sqrt())
    assert gradients.nonfinite(parts[1]) == ["weight"]
    assert torch.equal(parts[0].weight.grad, torch.ones(3, 3))
