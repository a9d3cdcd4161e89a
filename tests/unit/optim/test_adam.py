# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Adam on shards against torch's own, and rejected steps."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lr.optim.adam import _ON_SHARDS, ShardAdam, ShardAdamW
from torchtitan_lr.titan.components import OptimizersContainer
from torchtitan_lr.training.verdict import step_unless

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
    optimizer.__class__ = _ON_SHARDS[type(optimizer)]
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
        optimizer.__class__ = _ON_SHARDS[type(optimizer)]
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
    # The control: torch's own step uses the NaN.
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
