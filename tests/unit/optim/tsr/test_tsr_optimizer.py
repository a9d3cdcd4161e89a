# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`TSRAdam` in plain PyTorch, and with a trainer's calls: no container, no ranks."""

import doctest
import math
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.reference.tsr_adam import Hyper, ReferenceTSR
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import EMBEDDING, TSRSettings, plan_matrices

SETTINGS = TSRSettings(rank=3, embedding_rank=2, refresh_interval=3, embedding_refresh_interval=2)
DEFAULTS = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1}
MATRIX = "layers.0.attention.wq.weight"
SHAPES = {
    "tok_embeddings.weight": (12, 6),
    MATRIX: (9, 7),
    "layers.0.attention.wk.weight": (9, 7),
    "layers.0.feed_forward.w1.weight": (5, 8),
    "layers.0.ffn_norm.weight": (7,),
    "output.weight": (5, 7),
}


def build(settings=SETTINGS, dtype=torch.float64, **defaults):
    """Parameters under the names of a model, and their optimizer."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = nn.Parameter(value.to(dtype))
    return weights, TSRAdam(weights.items(), settings, **DEFAULTS | defaults)


def give(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in weights.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def step(weights, optimizer, seed):
    give(weights, seed)
    optimizer.step()


def bits(weights, optimizer):
    found = list(weights.values())
    for state in optimizer.state_dict()["state"].values():
        found += state.values()
    return torch.cat([value.detach().reshape(-1).view(torch.uint8) for value in found])


@pytest.mark.parametrize("one", [TSRAdam, SpectralOptimizer])
def test_the_example_runs(one):
    names = vars(sys.modules[one.__module__])
    (example,) = doctest.DocTestFinder(recurse=False).find(one, one.__name__, globs=names)
    assert len(example.examples) > 4
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_saved_state_goes_on_bitwise(dtype):
    """It is copied into fp32 or wider, not cast to the weights' dtype."""
    (one, first), (two, second) = build(dtype=dtype), build(dtype=dtype)
    for seed in range(3):
        step(one, first, seed)
    for name, value in one.items():
        two[name].data.copy_(value)
    second.load_state_dict(first.state_dict())
    assert second.stacks[0].U.dtype == torch.promote_types(dtype, torch.float32)
    for seed in range(3, 6):
        step(one, first, seed)
        step(two, second, seed)
    assert torch.equal(bits(one, first), bits(two, second))


@pytest.mark.parametrize(
    "changes",
    [
        {"moments": "keep"},
        {"moments": "rotate"},
        {"moments": "keep", "stagger": True},
        {"moments": "rotate", "stagger": True, "start": "random"},
        {"projection": "one_sided", "stagger": True, "start": "random", "moments": "keep"},
        {"power_iterations": 2, "start": "random"},
        {"projection": "one_sided", "power_iterations": 2, "oversampling": 0, "moments": "rotate"},
    ],
    ids=str,
)
def test_steps_are_the_algorithms(changes):
    """Seven steps against Algorithm 1 in fp64; at ε = 1e-8 rounding would count a thousandfold."""
    settings = replace(SETTINGS, oversampling=1, scale=0.7, refresh="sketch")
    settings = replace(settings, **changes)
    defaults = DEFAULTS | {"eps": 1e-5, "lr": 0.05}
    weights, optimizer = build(settings, **defaults)
    hyper = Hyper(**defaults, scale=0.7)
    start = {name: p.detach().clone() for name, p in weights.items()}
    twin = ReferenceTSR(start, plan_matrices(SHAPES, settings), settings, hyper, 2.0)
    assert len(twin.plans) == 4
    for seed in range(7):
        optimizer.begin()
        with optimizer.micro_batch(last=True):
            give(weights, seed)
            gradients = {name: p.grad.clone() for name, p in weights.items()}
        expected = twin.step(gradients)
        norm = optimizer.finish_sums().sqrt()
        optimizer.clip(2.0, norm)
        optimizer.step()
        assert norm.item() == pytest.approx(expected, rel=1e-11)
        for name, value in weights.items():
            torch.testing.assert_close(value, twin.weights[name], rtol=0, atol=1e-11)


def spoilt_step(weights, optimizer, seed, rejected):
    """A step with a NaN, clipped and settled; returns whether it refreshes the matrix with it."""
    optimizer.begin()
    with optimizer.micro_batch(last=True):
        give(weights, seed)
        weights[MATRIX].grad[1, 2] = math.nan
    refreshes = weights[MATRIX].grad is not None
    optimizer.clip(1.0, optimizer.finish_sums().sqrt())
    part = SimpleNamespace(named_parameters=weights.items)
    assert optimizer.nonfinite(part) == [MATRIX]  # clipping spoils no other
    optimizer.found_inf = torch.tensor(float(rejected))
    optimizer.step()
    optimizer.settle(rejected)
    optimizer.found_inf = None
    return refreshes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{"moments": "keep"}, {"moments": "rotate"}, {"projection": "one_sided"}], ids=str
)
def test_a_step_that_the_device_rejects_leaves_no_bit(changes, dtype):
    """Before each of five steps, two of which refresh, one with a NaN is rejected."""
    (weights, optimizer), (other, twin) = (build(replace(SETTINGS, **changes), dtype) for _ in "ab")
    refreshes = []
    for seed in range(5):
        before = bits(weights, optimizer)
        refreshes.append(spoilt_step(weights, optimizer, seed + 10, rejected=True))
        assert torch.equal(before, bits(weights, optimizer)), seed
        step(weights, optimizer, seed)
        step(other, twin, seed)
        assert torch.equal(bits(weights, optimizer), bits(other, twin)), seed
    assert refreshes == [1, 0, 0, 1, 0]  # by the steps done, as if nothing had been before
    # The control: accepted, it spoils the weights.
    spoilt_step(weights, optimizer, 5, rejected=False)
    assert not torch.isfinite(weights[MATRIX]).all()


@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("rejected", [0, 2, 3])
def test_a_program_that_never_settles_loses_no_refresh(rejected, saves):
    """Alone, with ``found_inf`` and no `settle`: a rejected step is as if it had not been."""

    def train(seeds):
        weights, optimizer = build()
        for seed in seeds:
            give(weights, abs(seed))
            optimizer.found_inf = torch.tensor(float(seed < 0))
            if seed < 0:
                weights[MATRIX].grad[1, 2] = math.nan
            optimizer.step()
            if seed < 0 and saves:  # a checkpoint behind the rejected step
                states = optimizer.state_dict()["state"].values()
                assert {int(state["step"]) for state in states} == {rejected}
        return bits(weights, optimizer)

    seeds = [1, 2, 3, 4, 5, 6]
    assert torch.equal(train([*seeds[:rejected], -9, *seeds[rejected:]]), train(seeds))


@pytest.mark.parametrize("start", ["gradient", "random"])
def test_staggered_refreshes_take_their_turn(start):
    """Bases of the gradient are needed in the first step; random ones wait for their turn."""
    shapes = {EMBEDDING: (64, 16), "layers.0.feed_forward.w1.weight": (40, 16), "gate": (1,)}
    shapes |= {f"layers.{i}.attention.wq.weight": (16, 16) for i in range(4)}
    base = TSRSettings(rank=4, embedding_rank=3, refresh_interval=10, embedding_refresh_interval=5)
    plans = plan_matrices(shapes, replace(base, stagger=True, start=start)).values()
    linear = [plan for plan in plans if plan.name != EMBEDDING]
    counts = Counter(step for plan in linear for step in range(1, 11) if plan.is_due(step, 1))
    assert sorted(counts.values()) == [1] * len(linear)
    assert all(plan.is_due(step=3, refreshes=0) for plan in plans) is (start == "gradient")
    for plan in plans if start == "random" else ():
        assert [plan.is_due(step, 0) for step in range(20)] == [
            plan.is_due(step, 1) for step in range(20)
        ]
    together = plan_matrices(shapes, base).values()
    assert all(plan.is_due(10, 1) and not plan.is_due(9, 1) for plan in together)
