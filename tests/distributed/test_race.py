# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rivals of the race on two replicas, against DDP and against their equations (fp64)."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scripts.research.race import powersgd
from tests.distributed.training import train
from tests.support import parity_runs
from tests.support.parity_runs import degrees
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.entries import ENTRIES, register_optimizer, variant

REPLICAS = [
    *degrees(local_batch=4),
    "--model.name=llama_full",
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
    "--experimental.custom_import=scripts.research.race.rivals",
]


def train_with(name: str, steps: int, dense_steps: int = 10, *arguments: str) -> dict[str, Any]:
    """Train on this rank; return its parameters."""
    options = [*REPLICAS, f"--training.steps={steps}", f"--optimizer.name={name}", *arguments]
    with patch.object(powersgd, "DENSE_STEPS", dense_steps):
        return train(options, everywhere=True)


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


def own_parameters(model_parts: Any, everywhere: bool) -> dict[str, np.ndarray]:
    """Return what this rank has: replicas of DiLoCo differ, which other runs must not."""
    named = model_parts[0].named_parameters()
    return {clean_name(name): local_part(p).detach().numpy().copy() for name, p in named}


def diloco_train(name: str, steps: int, *arguments: str) -> dict[str, np.ndarray]:
    """Train with DiLoCo; H = 2 is added to the race's."""
    from scripts.research.race.diloco import diloco

    if "DiLoCo-2" not in ENTRIES:
        register_optimizer(variant("AdamW", "DiLoCo-2", diloco(2), sums_replicas=True))
    with patch.object(parity_runs, "full_parameters", own_parameters):
        run = train_with(name, steps, 10, *arguments)
    return run["parameters"]


@pytest.mark.nightly
def test_diloco_moves_by_the_mean_of_the_replicas(two_ranks: RankPool) -> None:
    """W = W0 - 0.7 (1 + 0.9) (W0 - mean of local weights): Nesterov's first outer step."""
    pytest.importorskip("torchft")
    first, second = two_ranks.run(diloco_train, "DiLoCo-2", 2)
    start, _ = two_ranks.run(diloco_train, "DiLoCo-64", 1, "--optimizer.lr=1e-300")
    alone = two_ranks.run(diloco_train, "DiLoCo-64", 2)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        mean = (alone[0][name] + alone[1][name]) / 2
        wanted = start[name] - 0.7 * 1.9 * (start[name] - mean)
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-12)
        assert np.abs(alone[0][name] - alone[1][name]).max() > 1e-6  # without a sum they differ
