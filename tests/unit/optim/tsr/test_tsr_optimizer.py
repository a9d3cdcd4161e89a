# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.reference.tsr_adam import Hyper, ReferenceTSR
from tests.support.allocations import peak_bytes
from tests.unit.tiny import tiny_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.optim.tsr.drift import CHECKED, checksum
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices
from torchtitan_lr.training.verdict import step_unless

SETTINGS = TSRSettings(rank=3, embedding_rank=2, refresh_interval=3, embedding_refresh_interval=2)
DEFAULTS = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1}
MATRIX = "layers.0.attention.wq.weight"


def build(settings=SETTINGS, dtype=torch.float32):
    torch.manual_seed(0)
    model = LlamaModel(tiny_args("full")).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model, TSROptimizers([model], settings, dict(DEFAULTS))


def give(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def accumulate(model, optimizer, seeds):
    """One micro-batch per seed."""
    optimizer.zero_grad()
    optimizer.gradients.begin()
    for seed in seeds:
        with optimizer.gradients.micro_batch(last=seed == seeds[-1]):
            give(model, seed)


def step(model, optimizer, seeds=(0,)):
    accumulate(model, optimizer, seeds)
    optimizer.gradients.finish_sums()
    optimizer.step()


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


SHAPES = {
    "tok_embeddings.weight": (12, 6),
    "layers.0.attention.wq.weight": (9, 7),
    "layers.0.attention.wk.weight": (9, 7),
    "layers.0.feed_forward.w1.weight": (5, 8),
    "layers.0.ffn_norm.weight": (7,),
    "output.weight": (5, 7),
}


class Weights(nn.Module):
    """Parameters under the names of a model, and nothing else."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            owner = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            generator = torch.Generator().manual_seed(len(name) + len(shape))
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            owner.register_parameter(last, nn.Parameter(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_checksum_changes_with_every_bit_and_place_and_takes_no_copy(dtype):
    basis = torch.randn(2000, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.arange(1, CHECKED + 1)
    products = torch.empty_like(weights)

    def of(tensor):
        return checksum([basis[0], tensor, basis[1]], weights, products).item()

    flipped = basis.clone()
    flipped[:, 3] *= -1  # a singular vector's sign
    last = basis.clone()
    last[-1, -1] = torch.nextafter(last[-1, -1], torch.tensor(9.0, dtype=dtype))
    swapped = torch.cat([basis[1000:], basis[:1000]])
    others = [of(x) for x in (flipped, last, swapped, -basis, basis[:-1])]
    assert of(basis) == of(basis.clone())
    assert len({of(basis), *others}) == 6
    assert min(of(basis), *others) >= 0 and max(of(basis), *others) < 2**62
    for stored in (basis, basis.mT):
        assert peak_bytes(lambda x=stored: of(x)) < basis.nbytes


@pytest.mark.parametrize(
    "changes",
    [
        {"moments": "keep"},
        {"moments": "rotate"},
        {"moments": "keep", "stagger": True},
        {"moments": "rotate", "stagger": True, "start": "random"},
        {"projection": "one_sided", "stagger": True, "start": "random", "moments": "keep"},
        {"power_iterations": 2, "start": "random"},
        {"projection": "one_sided", "power_iterations": 2, "oversampling": 0},
    ],
    ids=str,
)
def test_steps_are_the_algorithms(changes):
    """Seven steps against Algorithm 1 on whole matrices, in fp64.

    With ε = 1e-5 two right implementations stay within 1e-13 of each other; 1e-8, Adam's usual one,
    would enlarge their rounding a thousandfold.
    """
    settings = replace(SETTINGS, oversampling=1, scale=0.7, refresh="sketch")
    settings = replace(settings, **changes)
    defaults = DEFAULTS | {"eps": 1e-5, "lr": 0.05}
    hyper = Hyper(**defaults, scale=0.7)
    model = Weights()
    optimizer = TSRAdam(model.named_parameters(), settings, **defaults)
    twin = ReferenceTSR(parameters(model), plan_matrices(SHAPES, settings), settings, hyper, 2.0)
    assert len(twin.plans) == 4
    for step_ in range(7):
        optimizer.zero_grad()
        optimizer.begin()
        with optimizer.micro_batch(last=True):
            give(model, step_)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        expected = twin.step(gradients)
        norm = optimizer.finish_sums().sqrt()
        optimizer.clip(2.0, norm)
        optimizer.step()
        assert norm.item() == pytest.approx(expected, rel=1e-11)
        for name, value in parameters(model).items():
            torch.testing.assert_close(value, twin.weights[name], rtol=0, atol=1e-11)


def bits(model, optimizer):
    """Every bit of weights, bases, moments and counters."""
    found = parameters(model) | snapshot(optimizer)
    return {name: value.reshape(-1).view(torch.uint8) for name, value in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{"moments": "keep"}, {"moments": "rotate"}, {"projection": "one_sided"}], ids=str
)
def test_a_step_that_the_device_rejects_leaves_no_bit(changes, dtype):
    """Before each of five steps, two of which refresh, one with a NaN is rejected."""
    (model, optimizer), (other, twin) = (build(replace(SETTINGS, **changes), dtype) for _ in "ab")
    rejected = []
    for seed in range(5):
        before = bits(model, optimizer)
        rejected.append(spoilt_step(model, optimizer, seed, torch.ones(())))
        after = bits(model, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in after.items()), seed
        for net, own in ((model, optimizer), (other, twin)):
            step(net, own, [seed])
        expected = bits(other, twin)
        assert all(torch.equal(v, expected[n]) for n, v in bits(model, optimizer).items()), seed
    assert rejected == [1, 0, 0, 1, 0]  # by the steps done, as if nothing had been before
    # The control: accepted, it spoils the weights.
    spoilt_step(model, optimizer, 5, torch.zeros(()))
    assert not torch.isfinite(parameters(model)[MATRIX]).all()


@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("rejected", [0, 2, 3])
def test_a_program_that_never_settles_loses_no_refresh(rejected, saves):
    """Alone, with ``found_inf`` and no `settle`: a rejected step is as if it had not been."""

    def train(seeds):
        model = Weights()
        optimizer = TSRAdam(model.named_parameters(), SETTINGS, **DEFAULTS)
        for seed in seeds:
            optimizer.zero_grad()
            give(model, abs(seed))
            optimizer.found_inf = torch.tensor(float(seed < 0))
            if seed < 0:
                model.get_parameter(MATRIX).grad[1, 2] = math.nan
            optimizer.step()
            if seed < 0 and saves:  # a checkpoint behind the rejected step
                states = optimizer.state_dict()["state"].values()
                assert {int(state["step"]) for state in states} == {rejected}
        return parameters(model), optimizer.state_dict()["state"]

    seeds = [1, 2, 3, 4, 5, 6]
    weights, states = train([*seeds[:rejected], -9, *seeds[rejected:]])
    torch.testing.assert_close((weights, states), train(seeds), rtol=0, atol=0)


def spoilt_step(model, optimizer, seed, rejected):
    """A step with a NaN; returns how often it refreshed the matrix with it."""
    gradients = optimizer.gradients
    count = gradients.state[model.get_parameter(MATRIX)]["refreshes"]
    norm = spoilt_norm(model, optimizer, seed + 10)
    gradients.clip(1.0, norm)
    refreshed = int(count)
    step_unless(rejected, optimizer)
    refreshed = int(count) - refreshed
    assert gradients.nonfinite(model) == [MATRIX]  # clipping spoils no other
    gradients.settle(bool(rejected))
    return refreshed


def spoilt_norm(model, optimizer, seed):
    """The norm of gradients of which one entry is NaN."""
    optimizer.zero_grad()
    optimizer.gradients.begin()
    with optimizer.gradients.micro_batch(last=True):
        give(model, seed)
        model.get_parameter(MATRIX).grad[1, 2] = float("nan")
    return optimizer.gradients.finish_sums().sqrt()


def snapshot(optimizer):
    return {k: v.clone() for k, v in optimizer.state_dict().items() if torch.is_tensor(v)}


def test_loading_copies_and_does_not_cast():
    model, optimizer = build(dtype=torch.bfloat16)
    for seed in range(2):
        step(model, optimizer, [seed])
    saved = snapshot(optimizer) | {
        k: v for k, v in optimizer.state_dict().items() if not torch.is_tensor(v)
    }
    other, again = build(dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    assert again.gradients.stacks[0].U.dtype == torch.float32
    assert all(torch.equal(v, snapshot(again)[k]) for k, v in snapshot(optimizer).items())
    for seed in (5, 6):
        step(model, optimizer, [seed])
        step(other, again, [seed])
    assert all(torch.equal(value, parameters(other)[n]) for n, value in parameters(model).items())
