# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rivals of the race on two replicas, against DDP and against their equations (fp64)."""

from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scripts.research.race import powersgd
from tests.support.rank_pool import RankPool


def powersgd_steps(by_ddp: bool) -> dict[str, np.ndarray]:
    """Train a small model by PowerSGD, by DDP with the hook or by the race's gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 12)).double()
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    wrapped, gradients = model, None
    with patch.object(powersgd, "DENSE_STEPS", 2):
        if by_ddp:
            wrapped = DistributedDataParallel(model)
            state = PowerSGDState(powersgd.WaitingGroup(group), 3, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook)
        else:
            gradients = powersgd.PowerSGDGradients([model], group, rank=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
        loss = wrapped(x).square().mean()
        if gradients is None:
            loss.backward()
        else:
            (loss / world).backward()  # as the trainer's, which divides by all replicas' tokens
            gradients.finish_sums()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def test_powersgd_is_that_of_ddp(two_ranks: RankPool) -> None:
    (ddp, _), (ours, other) = (two_ranks.run(powersgd_steps, by) for by in (True, False))
    for name, value in ours.items():
        np.testing.assert_array_equal(value, other[name])
        np.testing.assert_allclose(value, ddp[name], rtol=0, atol=1e-12)
