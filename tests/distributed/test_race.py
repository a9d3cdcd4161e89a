# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rivals of the race on two replicas, against DDP and against their equations (fp64)."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scripts.research.race import powersgd
from tests.support.rank_pool import RankPool

STEPS, DENSE = 6, 2


def powersgd_steps(by_ddp: bool) -> tuple[dict[str, np.ndarray], int]:
    """Train a small model by PowerSGD, by DDP with the hook or by the race's gradients.

    Return its weights, and the numbers that were summed.
    """
    sent: list[int] = []

    class Counting(powersgd.WaitingGroup):
        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            sent.append(sum(tensor.numel() for tensor in tensors))
            return super().allreduce(tensors, options)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 12)).double()
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    wrapped, gradients = model, None
    with patch.multiple(powersgd, DENSE_STEPS=DENSE, WaitingGroup=Counting):
        if by_ddp:
            wrapped = DistributedDataParallel(model)
            state = PowerSGDState(powersgd.WaitingGroup(group), 3, start_powerSGD_iter=DENSE)
            wrapped.register_comm_hook(state, powerSGD_hook)
        else:
            gradients = powersgd.PowerSGDGradients([model], group, rank=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
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
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}, sum(sent)


def test_powersgd_is_that_of_ddp(two_ranks: RankPool) -> None:
    runs = (two_ranks.run(powersgd_steps, by_ddp) for by_ddp in (True, False))
    ((ddp, _), _), ((ours, sent), (other, _)) = runs
    pieces = {name: value.shape for name, value in ours.items()}
    config = SimpleNamespace(training=SimpleNamespace(steps=STEPS))
    run: Any = SimpleNamespace(pieces_of=lambda _: pieces, config=config)
    with patch.object(powersgd, "DENSE_STEPS", DENSE):
        (row,) = powersgd.PowerSGDCost(run, 3).mean_traffic(0)
    assert abs(row.elements * STEPS - sent) <= STEPS / 2  # a mean is rounded
    for name, value in ours.items():
        np.testing.assert_array_equal(value, other[name])
        np.testing.assert_allclose(value, ddp[name], rtol=0, atol=1e-12)
