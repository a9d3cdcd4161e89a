# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The race's variants of TSR-Adam against their equations."""

import math

import pytest
import torch
from torch import nn

from scripts.research.race.tsr_variants import with_feedback, with_polar_factors
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings


def optimizer_of(change, **settings):
    torch.manual_seed(0)
    model = nn.ModuleDict({"w": nn.Linear(24, 16, bias=False)}).double()
    settings = TSRSettings(rank=4, refresh_interval=3, **settings)
    optimizer = TSRAdam(model.named_parameters(), settings, lr=0.01)
    change(optimizer)
    return model["w"].weight, optimizer


def gradients(steps=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 24, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("projection", ["two_sided", "one_sided"])
def test_feedback_loses_nothing(projection, micro_batches):
    """All gradients together are what the cores sent, lifted, and the last residual."""
    weight, optimizer = optimizer_of(with_feedback, projection=projection)
    (stack,) = optimizer.stacks
    sent = torch.zeros_like(weight)
    for gradient in gradients():
        optimizer.begin()
        for batch in range(micro_batches):
            with optimizer.micro_batch(last=batch == micro_batches - 1):
                part = gradient / micro_batches
                weight.grad = part if weight.grad is None else weight.grad + part
                optimizer.gradient_arrived(weight)
        optimizer.finish_sums()
        optimizer.step()  # which turns the bases before they are used
        optimizer.zero_grad()
        lifted = stack.U[0] @ stack.C[0]
        if stack.V is not None:
            lifted = lifted @ stack.V[0].mT
        sent += lifted.mT if stack.plan.transposed else lifted
    owed = stack.residuals[0].mT if stack.plan.transposed else stack.residuals[0]
    torch.testing.assert_close(sent + owed, sum(gradients()), rtol=0, atol=1e-12)
    assert owed.norm() > sent.norm() / 10  # the residual is no rounding error


def test_polar_factors_have_the_size_of_adams_directions():
    weight, optimizer = optimizer_of(with_polar_factors)
    (stack,) = optimizer.stacks
    before = weight.detach().clone()
    weight.grad = gradients()[0]
    optimizer.step()
    values = torch.linalg.svdvals((before - weight.detach()) / (0.01 * 0.75))
    assert values[:4].numpy() / math.sqrt(4) == pytest.approx([0.95] * 4, abs=0.3)
    assert values[4] < 1e-12
    assert not stack.exp_avg_sq.any()
