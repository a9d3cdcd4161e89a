# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norm and clipping of gradients, Adam on shards against torch's own, and rejected steps.

Layouts against one process are in tests/distributed, TSR-Adam's gradients in test_tsr_optimizer.py.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan_lr.optim.step import ON_SHARDS, ShardAdam, ShardAdamW, StoredGradients, step_unless

from torchtitan_lr.titan.components import OptimizersContainer

SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "fused": True}
PAIRS = [(torch.optim.Adam, ShardAdam), (torch.optim.AdamW, ShardAdamW)]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Kinds(TorchDispatchMode):
    """Records what the fused kernel is given."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_fused_adam" in str(func):
            self.found.update(type(tensor) for tensors in args[:4] for tensor in tensors)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_steps_are_torchs_own(theirs, ours, mesh):
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    model = copy.deepcopy(plain)
    for name, parameter in list(model.named_parameters()):
        sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        model.register_parameter(name, sharded)
    optimizer = theirs(model.parameters(), **SETTINGS)
    optimizer.__class__ = ON_SHARDS[type(optimizer)]
    assert type(optimizer) is ours
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    expected = theirs(plain.parameters(), **SETTINGS)
    for _ in range(3):
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = distribute_tensor(a.grad.clone(), mesh, b.placements)
        expected.step()
        with Kinds() as kinds:
            optimizer.step()
        assert kinds.found and DTensor not in kinds.found
    for before, a, b in zip(start, plain.parameters(), model.parameters(), strict=True):
        assert not torch.equal(before, a)
        assert torch.equal(a, b.full_tensor())
        state = optimizer.state[b]
        assert isinstance(state["exp_avg"], DTensor) and isinstance(state["exp_avg_sq"], DTensor)
        assert state["step"] == 3


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_rejected_step_leaves_no_bit(kind, implementation, mesh):
    """Between accepted steps, which are torch's own; fused Adam reads nothing on the host."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    model = copy.deepcopy(plain)
    how = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    settings = {"lr": 1e-2, "weight_decay": 0.1, **how}
    container = OptimizersContainer([model], kind, settings)
    for optimizer in container:
        optimizer.__class__ = ON_SHARDS[type(optimizer)]
    expected = kind(plain.parameters(), **settings)
    for round_ in range(3):
        before = {name: value.clone() for name, value in state_of(model, container).items()}
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        step_unless(torch.ones(()), container)
        after = state_of(model, container)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert not round_ or len(before) == 8
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        expected.step()
        step_unless(torch.zeros(()), container)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
    # The control: torch's own step takes the NaN.
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    container.step()
    assert not any(torch.isfinite(value).all() for value in model.parameters())


def state_of(model, container):
    """Weights, and what the optimizer holds."""
    (optimizer,) = container
    held = {
        f"{name}.{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    return {name: value.reshape(-1) for name, value in (*model.named_parameters(), *held.items())}


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


def test_bf16_gradients_are_clipped_as_fp64_ones():
    """Neither the norm nor the factor is rounded to bf16."""
    model = nn.Linear(200, 50, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = model.weight.grad.double()
    gradients = StoredGradients([model], None)
    norm = gradients.reduce_and_square_norm().sqrt()
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-12)
    gradients.clip(exact.norm().item() / 393_728, norm)  # bf16 rounds this factor by 0.24%
    scale = (model.weight.grad.double() * exact).sum() / exact.square().sum()
    assert scale.item() * 393_728 == pytest.approx(1, abs=1e-3)  # products: 6e-4


def test_what_is_not_finite_is_named(parts):
    gradients = StoredGradients(parts, None)
    assert gradients.nonfinite(parts[1]) == []
    parts[1].weight.grad[1, 0] = float("inf")
    assert gradients.nonfinite(parts[1]) == ["weight"]
    assert not torch.isfinite(gradients.reduce_and_square_norm())
    # Clipping leaves the others as they are, so that the culprit can be named after it.
    gradients.clip(1.0, gradients.reduce_and_square_norm().sqrt())
    assert gradients.nonfinite(parts[1]) == ["weight"]
    assert torch.equal(parts[0].weight.grad, torch.ones(3, 3))
