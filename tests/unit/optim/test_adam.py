# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Adam on shards against torch's own, with rejected steps between."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.allocations import Noted
from torchtitan_lr.optim.containers import NamedOptimizers, adam_with_state
from torchtitan_lr.training.verdict import step_unless


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_steps_are_torchs_own_and_a_rejected_one_leaves_no_bit(name, implementation, one_rank):
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    model = copy.deepcopy(plain)
    for key, parameter in list(model.named_parameters()):
        sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        model.register_parameter(key, sharded)
    how = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "implementation": implementation}
    group = {"params": list(model.named_parameters()), "lr": 1e-2, "weight_decay": 0.1}
    optimizer = adam_with_state([group], SimpleNamespace(name=name, **how))
    container = NamedOptimizers([model], [optimizer])
    expected = getattr(torch.optim, name)(
        plain.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6
    )

    def step(rejected, gradients):
        for a, b, gradient in zip(plain.parameters(), model.parameters(), gradients, strict=True):
            a.grad, b.grad = gradient, distribute_tensor(gradient.clone(), mesh, b.placements)
        step_unless(torch.tensor(float(rejected)), container)

    kinds = set()  # of what Adam's kernels are given

    def note(func, args, _):
        if any(name in str(func) for name in ("_fused_adam", "addcdiv")):
            kinds.update(map(type, args[0] if isinstance(args[0], list | tuple) else args[:1]))

    for _ in range(3):
        before = bits(model, container)
        step(True, [torch.full_like(p, float("nan")) for p in plain.parameters()])
        assert torch.equal(before, bits(model, container))
        with Noted(note):
            step(False, [torch.randn(p.shape) for p in plain.parameters()])
        assert kinds and DTensor not in kinds
        expected.step()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b.full_tensor(), a, rtol=1e-6, atol=1e-7)
            assert optimizer.state[b]["step"] == expected.state[a]["step"]
            assert isinstance(optimizer.state[b]["exp_avg"], DTensor)
    # The control: accepted, the NaN spoils the weights.
    step(False, [torch.full_like(p, float("nan")) for p in plain.parameters()])
    assert not any(torch.isfinite(p.full_tensor()).all() for p in model.parameters())


def bits(model, container):
    states = [v for v in container.state_dict().values() if isinstance(v, torch.Tensor)]
    found = [
        v.full_tensor() if isinstance(v, DTensor) else v for v in (*model.parameters(), *states)
    ]
    assert len(found) == 8
    return torch.cat([value.detach().reshape(-1) for value in found])
