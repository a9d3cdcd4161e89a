# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.reference.tsr_adam import ReferenceTSR
from torchtitan_lr.optim.tsr.adam import (
    AdamHyperparameters,
    adam_direction,
    change_bases,
    lift,
    project,
    rotate,
)
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.optim.tsr.randomized_svd import SVD, draw_sketches
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices
from torchtitan_lr.optim.tsr.stack import MatrixStack, Refresh
from torchtitan_lr.optim.tsr.synchronize import bases_and_core

F64 = torch.float64
NAME = "layers.0.attention.wq.weight"
HYPER = AdamHyperparameters(lr=0.05, eps=1e-6, weight_decay=0.1, scale=0.75)


def draw(*size, seed=0):
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def orthonormal(m, r, seed=0):
    return torch.linalg.qr(draw(m, r, seed=seed))[0]


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
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    defaults = {name: getattr(hyper, name) for name in names}
    layer = layer_of(weight)
    optimizer = TSROptimizers([layer], replace(settings, scale=hyper.scale), defaults)
    return layer.get_parameter(NAME), optimizer


def run(hyper, settings, steps=8, gradient=gradient):
    """What training runs, on one matrix."""
    matrix, optimizer = build(hyper, settings, draw(9, 7, seed=99))
    for step in range(steps):
        matrix.grad = gradient(step).clone()
        optimizer.step()
        optimizer.zero_grad()
    return matrix.detach()


def projected(g, left, right):
    core = torch.zeros(left.shape[1], g.shape[1] if right is None else right.shape[1], dtype=F64)
    project(g, left, right, out=core)
    return core


def lifted(direction, left, right):
    weight = torch.full((left.shape[0], right.shape[0]), 3.0, dtype=F64)
    lift(direction, left, right, weight, shrink=0.0, rate=1.0)
    return weight


@pytest.mark.parametrize("projection", ["two_sided", "one_sided"])
@pytest.mark.parametrize("moments", ["keep", "rotate", "reset"])
def test_equals_the_twin(moments, projection):
    settings = TSRSettings(rank=3, refresh_interval=3, moments=moments, projection=projection)
    plans = plan_matrices({NAME: (9, 7)}, settings)
    twin = ReferenceTSR({NAME: draw(9, 7, seed=99)}, plans, settings, HYPER)
    for step in range(8):
        twin.step({NAME: gradient(step)})
    found = run(HYPER, settings)
    torch.testing.assert_close(found, twin.weights[NAME], rtol=1e-10, atol=1e-10)
    other = run(replace(HYPER, scale=0.7), settings)
    assert (other - found).abs().max() > 1e-3


def test_full_rank_is_adam_in_the_rotated_basis():
    """With r = min(m, n) nothing is lost: Adam on UᵀGV, with fixed bases."""
    settings = TSRSettings(rank=7, refresh_interval=100)
    weight = draw(9, 7, seed=99)
    u, s, vt = torch.linalg.svd(gradient(0), full_matrices=False)
    omega = draw_sketches([(NAME, 0)], (7, 7), 0, weight)[0]
    v = vt.T * torch.where(omega[:, 0] @ vt.T < 0, -1.0, 1.0)
    u = u * torch.where(omega[:, 0] @ vt.T < 0, -1.0, 1.0)
    m = v2 = torch.zeros(7, 7, dtype=F64)
    for step in range(5):
        g = u.T @ gradient(step) @ v if step else torch.diag(s)
        m, v2 = 0.9 * m + 0.1 * g, 0.999 * v2 + 0.001 * g * g
        d = m / (1 - 0.9 ** (step + 1)) / ((v2 / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
        weight = weight - 0.05 * (0.75 * u @ d @ v.T + 0.1 * weight)
    torch.testing.assert_close(run(HYPER, settings, steps=5), weight, rtol=1e-9, atol=1e-9)


def test_projection_and_lift_on_whole_bases_lose_nothing():
    g, left, right = draw(6, 6), orthonormal(6, 6, 1), orthonormal(6, 6, 2)
    torch.testing.assert_close(lifted(projected(g, left, right), left, right), g)
    short = left[:, :2], right[:, :2]
    assert (lifted(projected(g, *short), *short) - g).abs().max() > 0.1
    assert projected(g, short[0], None).shape == (2, 6)
    whole = lifted(projected(g, left, right), left, right)
    weight = draw(6, 6, seed=4)
    decayed = weight.clone()
    lift(projected(g, left, right), left, right, decayed, shrink=0.9, rate=-0.5)
    torch.testing.assert_close(decayed, 0.9 * weight - 0.5 * whole)


def test_projection_is_linear_so_cores_accumulate():
    left, right = orthonormal(6, 2, 1), orthonormal(5, 2, 2)
    parts = [draw(6, 5, seed=s) for s in range(3)]
    core = torch.zeros(2, 2, dtype=F64)
    for g in parts:
        project(g, left, right, out=core)
    torch.testing.assert_close(core, projected(sum(parts), left, right))


def test_a_refresh_knows_its_core():
    g = gradient(1)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    svd = SVD(u[:, :3], s[:3], vt[:3].T)
    for two_sided in (True, False):
        left, right, core = bases_and_core(svd, two_sided)
        assert (right is None) != two_sided
        torch.testing.assert_close(core, projected(g, left, right), atol=1e-12, rtol=1e-12)


def test_rotation_keeps_what_both_bases_span():
    old, new = orthonormal(8, 3, 1), orthonormal(8, 3, 1) @ orthonormal(3, 3, 5)
    average, square = draw(3, 3, seed=2), draw(3, 3, seed=3).square()
    rotated, _ = rotate(average, square, new.T @ old, new.T @ old)
    torch.testing.assert_close(new @ rotated @ new.T, old @ average @ old.T)
    # A permutation of the basis only permutes both moments.
    swap = torch.eye(3, dtype=F64)[[1, 2, 0]]
    rotated, squares = rotate(average, square, swap, None)
    torch.testing.assert_close(rotated, average[[1, 2, 0]])
    torch.testing.assert_close(squares, square[[1, 2, 0]])


def test_moments_when_bases_change():
    plans = plan_matrices({NAME: (5, 4)}, TSRSettings(rank=2))
    average, square = draw(2, 2), draw(2, 2) ** 2
    left, right = orthonormal(5, 2, 7), orthonormal(4, 2, 8)

    def changed(moments):
        settings = TSRSettings(rank=2, moments=moments)
        stack = MatrixStack([plans[NAME]], [draw(5, 4)], (), settings)
        stack.left[0], stack.right[0] = orthonormal(5, 2), orthonormal(4, 2)
        stack.average[0], stack.average_square[0], stack.ages[0] = average, square, 9
        overlaps = left.T @ stack.left, right.T @ stack.right
        core = torch.zeros(1, 2, 2, dtype=F64)
        refresh = Refresh(0, [0], left[None], right[None], core)
        if moments == "rotate":
            refresh.overlaps = overlaps
        change_bases(stack, refresh)
        assert torch.equal(stack.left[0], left) and torch.equal(stack.right[0], right)
        assert stack.refreshes.item() == 1
        return stack

    kept = changed("keep")
    assert torch.equal(kept.average[0], average) and torch.equal(kept.average_square[0], square)
    assert kept.ages.item() == 9
    reset = changed("reset")
    assert reset.ages.item() == 0 and not reset.average.any() and not reset.average_square.any()
    rotated = changed("rotate")
    assert rotated.ages.item() == 9 and (rotated.average_square >= 0).all()
    assert not torch.equal(rotated.average[0], average)


def test_direction_with_ages_of_their_own():
    m, v = draw(2, 3, 3), draw(2, 3, 3, seed=1).square()
    both = adam_direction(m, v, torch.tensor([1.0, 5.0], dtype=F64)[:, None, None], HYPER)
    for i, age in enumerate((1, 5)):
        torch.testing.assert_close(both[i], adam_direction(m[i], v[i], age, HYPER))


@pytest.mark.parametrize("projection", ["two_sided", "one_sided"])
def test_kept_moments_mean_the_same_after_a_refresh(projection):
    """A gradient that only turns round: refreshing in every step changes nothing, whatever Ω."""
    settings = TSRSettings(rank=3, refresh_interval=1, moments="keep", projection=projection)
    weights = []
    for interval in (1, 100):
        changed = replace(settings, refresh_interval=interval, power_iterations=20)
        weights.append(run(HYPER, changed, 8, lambda step: gradient(0) * (-1) ** (step // 3)))
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


def test_weight_decay_is_decoupled():
    """A zero gradient leaves W ← (1 − ηλ)W, whatever the moments' ε."""
    weight = draw(5, 4)
    matrix, optimizer = build(HYPER, TSRSettings(rank=2), weight)
    (stack,) = optimizer.synchronizer.stacks
    stack.left[0], stack.right[0] = orthonormal(5, 2), orthonormal(4, 2)
    # Not the first step, which would find other bases.
    stack.refreshes += 1
    optimizer.optimizers[0].steps += 1
    matrix.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(stack.left[0], orthonormal(5, 2))
    torch.testing.assert_close(matrix.detach(), (1 - 0.05 * 0.1) * weight)
