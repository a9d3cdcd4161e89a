# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradients between backward and the optimizer step; TSR-Adam's are in test_tsr_optimizer.py."""

import pytest
import torch
from torch import nn

from torchtitan_lr.training.gradients import StoredGradients


@pytest.fixture
def parts():
    """Two parts of a model: gradients of norms 3 and 4, and one parameter without."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(2, 2)
    first.weight.grad = torch.ones(3, 3)
    second.weight.grad = torch.full((2, 2), 2.0)
    return [first, second]


def test_norm_and_clipping(parts):
    gradients = StoredGradients(parts, None)
    gradients.accumulate(last=True)
    norm = gradients.reduce_and_square_norm().sqrt()
    assert norm.item() == pytest.approx(5)
    gradients.clip(10.0, norm)  # small enough
    assert torch.equal(parts[0].weight.grad, torch.ones(3, 3))
    gradients.clip(1.0, norm)
    # Clipping divides by the norm + 1e-6; the rest is fp32's rounding.
    assert gradients.reduce_and_square_norm().sqrt().item() == pytest.approx(
        5 / (5 + 1e-6), rel=1e-6
    )
    torch.testing.assert_close(parts[1].weight.grad, torch.full((2, 2), 0.4))
    assert parts[1].bias.grad is None


def test_what_is_not_finite_is_named(parts):
    gradients = StoredGradients(parts, None)
    assert gradients.nonfinite() is None
    parts[1].weight.grad[1, 0] = float("inf")
    assert gradients.nonfinite() == "weight"
    assert not torch.isfinite(gradients.reduce_and_square_norm())
    # Clipping leaves the others as they are, so that the culprit can be named after it.
    gradients.clip(1.0, gradients.reduce_and_square_norm().sqrt())
    assert gradients.nonfinite() == "weight"
    assert torch.equal(parts[0].weight.grad, torch.ones(3, 3))
