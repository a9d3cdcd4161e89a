# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`TSRAdam` in plain PyTorch: no trainer, no container."""

import doctest

import pytest
import torch
from torch import nn

from torchtitan_lr.optim.tsr import algorithm
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings


def test_the_example_trains():
    (example,) = doctest.DocTestFinder(recurse=False).find(
        TSRAdam, "TSRAdam", globs=vars(algorithm)
    )
    assert len(example.examples) > 6
    assert doctest.DocTestRunner().run(example).failed == 0


def build(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)).double()
    settings = TSRSettings(rank=3, refresh_interval=2)
    return model, TSRAdam(model.named_parameters(), settings, **options)


def backward(model):
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(5, 6, generator=generator, dtype=torch.float64)).square().mean().backward()


def take_steps(model, optimizer):
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def test_a_saved_state_goes_on_bitwise():
    (one, first), (two, second) = build(), build()
    take_steps(one, first)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    take_steps(one, first)
    take_steps(two, second)
    for found, expected in zip(two.parameters(), one.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_frozen_parameter_stays_and_a_groups_rate_is_used():
    model, _ = build()
    model[2].weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": model[0].named_parameters("0"), "lr": 0.0},
        {"params": model[2].named_parameters("2"), "lr": 0.1},
    ]
    optimizer = TSRAdam(groups, TSRSettings(rank=3), weight_decay=0.1)
    backward(model)
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"2.bias"}


def test_parameters_without_names_are_refused():
    with pytest.raises(ValueError, match=r"model\.named_parameters\(\)"):
        TSRAdam(nn.Linear(4, 4).parameters(), TSRSettings(rank=2))
