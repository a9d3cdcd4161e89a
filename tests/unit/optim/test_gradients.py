# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norm and clipping of stored gradients; in layouts: tests/distributed."""

import pytest
import torch
from torch import nn

from torchtitan_lr.optim.gradients import StoredGradients


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
