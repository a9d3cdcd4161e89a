# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from dataclasses import replace

import pytest
import torch

from tests.reference.tsr_adam import ReferenceTSR
from torchtitan_lr.optim.tsr.adam import (
    Bases,
    Hyper,
    State,
    adam_direction,
    change_bases,
    lift,
    new_bases,
    project,
    rotate,
    tsr_adam_step,
)
from torchtitan_lr.optim.tsr.randomized_svd import SVD, SketchSettings, draw_sketches
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

F64 = torch.float64
NAME = "layers.0.attention.wq.weight"
HYPER = Hyper(lr=0.05, eps=1e-6, weight_decay=0.1, scale=0.75)


def draw(*size, seed=0):
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def orthonormal(m, r, seed=0):
    return torch.linalg.qr(draw(m, r, seed=seed))[0]


def gradient(step):
    return (draw(9, 7, seed=step) * 2.0 ** -torch.arange(7)) @ draw(7, 7, seed=50 + step)


def run(hyper, settings, steps=8, gradient=gradient):
    """The pure function, refreshing as planned."""
    plan = plan_matrices({NAME: (9, 7)}, settings)[NAME]
    two_sided = plan.two_sided
    weight = draw(9, 7, seed=99)
    flip = (lambda x: x.T) if plan.transposed else (lambda x: x)
    weight = flip(weight)
    size = (plan.rank, plan.rank if two_sided else plan.columns)
    bases = Bases(
        torch.zeros(plan.rows, plan.rank, dtype=F64),
        torch.zeros(plan.columns, plan.rank, dtype=F64) if two_sided else None,
    )
    state = State(bases, torch.zeros(size, dtype=F64), torch.zeros(size, dtype=F64), 0)
    refreshes = 0
    sketching = SketchSettings(plan.rank, plan.width, settings.power_iterations)
    for step in range(steps):
        sketch = None
        if plan.is_due(step, refreshes):
            key, width = [(NAME, refreshes)], (plan.columns, plan.width)
            sketch = draw_sketches(key, width, settings.seed, weight)[0]
            refreshes += 1
        weight, state = tsr_adam_step(weight, flip(gradient(step)), state, hyper, sketch, sketching)
    return flip(weight)


@pytest.mark.parametrize("projection", ["two_sided", "one_sided"])
@pytest.mark.parametrize("moments", ["keep", "rotate", "reset"])
def test_equals_the_twin(moments, projection):
    settings = TSRSettings(rank=3, refresh_interval=3, moments=moments, projection=projection)
    plans = plan_matrices({NAME: (9, 7)}, settings)
    twin = ReferenceTSR({NAME: draw(9, 7, seed=99)}, plans, settings, HYPER)
    for step in range(8):
        twin.step({NAME: gradient(step)})
    found = run(replace(HYPER, moments=moments), settings)
    torch.testing.assert_close(found, twin.weights[NAME], rtol=1e-10, atol=1e-10)
    other = run(replace(HYPER, moments=moments, scale=0.7), settings)
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
    g, bases = draw(6, 6), Bases(orthonormal(6, 6, 1), orthonormal(6, 6, 2))
    torch.testing.assert_close(lift(project(g, bases), bases), g)
    short = Bases(bases.left[:, :2], bases.right[:, :2])
    assert (lift(project(g, short), short) - g).abs().max() > 0.1
    assert project(g, Bases(None, short.right)).shape == (6, 2)


def test_projection_is_linear_so_cores_accumulate():
    bases = Bases(orthonormal(6, 2, 1), orthonormal(5, 2, 2))
    parts = [draw(6, 5, seed=s) for s in range(3)]
    torch.testing.assert_close(sum(project(g, bases) for g in parts), project(sum(parts), bases))


def test_a_refresh_knows_its_core():
    g = gradient(1)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    svd = SVD(u[:, :3], s[:3], vt[:3].T)
    for two_sided in (True, False):
        bases, core = new_bases(svd, two_sided)
        torch.testing.assert_close(core, project(g, bases), atol=1e-12, rtol=1e-12)


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
    state = State(Bases(orthonormal(5, 2), orthonormal(4, 2)), draw(2, 2), draw(2, 2) ** 2, 9)
    bases = Bases(orthonormal(5, 2, 7), orthonormal(4, 2, 8))
    kept = change_bases(state, bases, "keep")
    assert kept.average is state.average and kept.age == 9 and kept.bases is bases
    reset = change_bases(state, bases, "reset")
    assert reset.age == 0 and not reset.average.any() and not reset.average_square.any()
    rotated = change_bases(state, bases, "rotate")
    assert rotated.age == 9 and (rotated.average_square >= 0).all()


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
        hyper = replace(HYPER, moments="keep")
        weights.append(run(hyper, changed, 8, lambda step: gradient(0) * (-1) ** (step // 3)))
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


def test_weight_decay_is_decoupled():
    """A zero gradient leaves W ← (1 − ηλ)W, whatever the moments' ε."""
    state = State(Bases(orthonormal(5, 2), orthonormal(4, 2)), *torch.zeros(2, 2, 2, dtype=F64), 0)
    weight = draw(5, 4)
    after, _ = tsr_adam_step(weight, torch.zeros_like(weight), state, HYPER)
    torch.testing.assert_close(after, (1 - 0.05 * 0.1) * weight)
