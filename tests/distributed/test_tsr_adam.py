# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas of TSR-Adam whose bases drift apart, and TSR-Adam alone with a group (fp64).

That every layout trains like one process is in `test_layout`, that one process does what the
algorithm says in `tests/unit/optim/tsr`.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference.tsr_adam import Hyper, ReferenceTSR
from tests.support.rank_pool import RankPool
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

SHAPES: dict[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (14, 8),
    "layers.0.attention.wq.weight": (8, 6),
    "layers.0.attention.wo.weight": (5, 8),
    "layers.1.feed_forward.w2.weight": (6, 12),
    "layers.1.ffn_norm.weight": (6,),
}
SETTINGS = TSRSettings(
    rank=3,
    refresh_interval=3,
    oversampling=1,
    embedding_rank=4,
    embedding_refresh_interval=2,
    refresh="sketch",
    overlap_buckets=1,
)
HYPER = Hyper(lr=0.05, eps=1e-6, weight_decay=0.1, scale=0.75)
STEPS = 7
MAX_NORM = 2.0
RANKS = 4
TOLERANCE = 1e-10
"""The twin computes UᵀGV on a refresh; its rounding off the diagonal is divided by Adam's ε."""


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def gradient(name: str, step: int, rank: int) -> torch.Tensor:
    """A gradient with a decaying spectrum; those of the ranks add up to the step's."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + len(name))
    full = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 1:
        return full
    values = 2.0 ** -torch.arange(min(shape), dtype=torch.float64)
    shared = torch.Generator().manual_seed(step + 1)
    right = torch.randn(len(values), shape[1], generator=shared, dtype=torch.float64)
    return (full[:, : len(values)] * values) @ right


def model_of_weights() -> nn.Module:
    """Modules with the parameters under their names."""
    root = nn.Module()
    for name, full in weights().items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(full))
    return root


def train() -> nn.Module:
    """Train on four replicas; call it on each."""
    model = model_of_weights()
    optimizer = TSROptimizers(
        [model], SETTINGS, HYPER.defaults(), replicas=dist.group.WORLD, stages=None
    )
    gradients = optimizer.gradients
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients.begin()
        with gradients.micro_batch(last=True):
            for name, parameter in model.named_parameters():
                parameter.grad = gradient(name, step, dist.get_rank())
        norm = gradients.finish_sums()
        dist.all_reduce(norm)
        gradients.clip(MAX_NORM, norm.sqrt())
        optimizer.step()
        gradients.settle(rejected=False)
    return model


def twin() -> dict[str, torch.Tensor]:
    """Train in one process, with the whole gradient."""
    reference = ReferenceTSR(weights(), plan_matrices(SHAPES, SETTINGS), SETTINGS, HYPER, MAX_NORM)
    for step in range(STEPS):
        parts = {name: [gradient(name, step, rank) for rank in range(RANKS)] for name in SHAPES}
        reference.step({name: torch.stack(found).sum(0) for name, found in parts.items()})
    return reference.weights


def train_with_a_drifting_replica(
    side: str, odd: int, error: float
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Disturb one replica's bases as another machine's rounding would."""
    from torchtitan_lr.optim.tsr import refresh
    from torchtitan_lr.titan import logger

    original, lines = refresh.randomized_svd, []

    def disturbed(*args: Any) -> list[Any]:
        results = original(*args)
        for svd in results:
            if dist.get_rank() == odd:
                getattr(svd, side)[0].view(-1)[0] += error
        return results

    with (
        patch.object(refresh, "randomized_svd", disturbed),
        patch.object(logger, "warning", lambda text, *rest: lines.append(text % rest)),
    ):
        model = train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, lines


@pytest.mark.parametrize(
    ("side", "odd", "error"),
    [
        ("U", 2, 1e-9),
        ("V", 2, 1e-9),
        ("S", 1, 1e-9),
        ("U", 0, 1e-9),
        ("U", 1, 1e-3),  # all would be wrong by more than the tolerance with its bases
    ],
)
def test_a_drifting_replica_is_repaired_and_told(
    side: str, odd: int, error: float, four_ranks: RankPool
) -> None:
    results = four_ranks.run(train_with_a_drifting_replica, side, odd, error)
    expected = twin()
    first, _ = results[0]
    for weights, lines in results:
        assert lines and all("Replicas computed different bases" in line for line in lines)
        assert "layers.0.attention" in lines[0]
        for name, weight in weights.items():
            assert torch.equal(weight, first[name])
            # All take the first replica's bases, which may be the disturbed ones.
            limit = TOLERANCE if odd else 1e-6
            torch.testing.assert_close(weight, expected[name], rtol=limit, atol=limit)


def train_alone(ranks: int) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch on this rank's rows of a batch of four; on the whole batch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)).double()
    group = dist.group.WORLD if ranks > 1 else None
    settings = TSRSettings(rank=3, refresh_interval=2, refresh="sketch")
    optimizer = TSRAdam(model.named_parameters(), settings, eps=1e-3, group=group)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        own = x.chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
        model(own).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_alone_with_a_group_it_trains_on_the_mean_gradient(two_ranks: RankPool) -> None:
    expected = train_alone(1)
    for weights in two_ranks.run(train_alone, 2):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-10)
