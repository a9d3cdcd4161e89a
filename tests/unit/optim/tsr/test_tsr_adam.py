# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.reference.tsr_adam import Hyper
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.optim.tsr.svd import draw_sketches

F64 = torch.float64
NAME = "layers.0.attention.wq.weight"
HYPER = Hyper(lr=0.05, eps=1e-6, weight_decay=0.1, scale=0.75)


def draw(*size, seed=0):
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def gradient(step):
    return (draw(9, 7, seed=step) * 2.0 ** -torch.arange(7)) @ draw(7, 7, seed=50 + step)


def layer_of(weight):
    """One matrix under the name of a model's."""
    root = owner = nn.Module()
    *path, last = NAME.split(".")
    for part in path:
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter(last, nn.Parameter(weight.clone()))
    return root


def build(hyper, settings, weight):
    layer = layer_of(weight)
    settings = replace(settings, scale=hyper.scale)
    optimizer = TSRAdam(layer.named_parameters(), settings, **hyper.defaults())
    return layer.get_parameter(NAME), optimizer


def run(hyper, settings, steps=8, gradient=gradient):
    """Train one matrix as in plain PyTorch."""
    matrix, optimizer = build(hyper, settings, draw(9, 7, seed=99))
    for step in range(steps):
        matrix.grad = gradient(step).clone()
        optimizer.step()
        optimizer.zero_grad()
    return matrix.detach()


def test_full_rank_is_adam_in_the_rotated_basis():
    """With r = min(m, n) nothing is lost: Adam on UᵀGV, with fixed bases."""
    settings = TSRSettings(rank=7, refresh_interval=100)
    weight = draw(9, 7, seed=99)
    u, s, vt = torch.linalg.svd(gradient(0), full_matrices=False)
    omega = draw_sketches([(NAME, 0)], (7, 7), weight)[0]
    v = vt.T * torch.where(omega[:, 0] @ vt.T < 0, -1.0, 1.0)
    u = u * torch.where(omega[:, 0] @ vt.T < 0, -1.0, 1.0)
    m = v2 = torch.zeros(7, 7, dtype=F64)
    for step in range(5):
        g = u.T @ gradient(step) @ v if step else torch.diag(s)
        m, v2 = 0.9 * m + 0.1 * g, 0.999 * v2 + 0.001 * g * g
        d = m / (1 - 0.9 ** (step + 1)) / ((v2 / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
        weight = weight - 0.05 * (0.75 * u @ d @ v.T + 0.1 * weight)
    torch.testing.assert_close(run(HYPER, settings, steps=5), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("projection", ["two_sided", "one_sided"])
def test_kept_moments_mean_the_same_after_a_refresh(projection):
    """A gradient that only turns round: refreshing in every step changes nothing, whatever Ω."""
    settings = TSRSettings(rank=3, refresh_interval=1, moments="keep", projection=projection)
    weights = []
    for interval in (1, 100):
        changed = replace(settings, refresh_interval=interval, power_iterations=20)
        weights.append(run(HYPER, changed, 8, lambda step: gradient(0) * (-1) ** (step // 3)))
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)
