# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam in plain PyTorch with a group (fp64): the mean gradient, and bases that drift apart."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.rank_pool import RankPool
from torchtitan_lr.optim.tsr import stack, svd
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.titan import logger

BATCH = 12


def train(ranks: int) -> dict[str, torch.Tensor]:
    """Train in plain PyTorch on this rank's rows of a batch; on the whole batch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)).double()
    group = dist.group.WORLD if ranks > 1 else None
    settings = TSRSettings(rank=3, refresh_interval=2, refresh="sketch")
    optimizer = TSRAdam(model.named_parameters(), settings, eps=1e-3, group=group)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
        own = x.chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
        (model(own).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.settle(rejected=False)  # repairs bases before the next backward
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_alone_with_a_group_it_trains_on_the_whole_batch(two_ranks: RankPool) -> None:
    expected = train(1)
    for weights in two_ranks.run(train, 2):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-10)


def decomposed(count: int, dtype: torch.dtype, *shape: int) -> tuple[float, int]:
    """The largest change of shared decompositions from a rank's own, and how many it took."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(count, 37, 37, generator=generator, dtype=torch.float64).to(dtype)
    own, taken, exact = svd._small_svd(squares), [], svd._small_svd

    def counted(part: torch.Tensor) -> svd.SVD:
        taken.append(len(part))
        return exact(part)

    mesh = init_device_mesh("cpu", shape)
    with patch.object(svd, "_small_svd", counted):
        shared = svd._shared_svd(squares, [mesh.get_group(dim) for dim in range(mesh.ndim)])
    return max(float((a - b).abs().max()) for a, b in zip(own, shared, strict=True)), taken[0]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 0.0), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("count", "shape", "most"), [(1, (2,), 1), (2, (2,), 1), (7, (2,), 4), (7, (2, 2), 2)]
)
def test_ranks_share_decompositions(
    count: int,
    shape: tuple[int, ...],
    most: int,
    dtype: torch.dtype,
    limit: float,
    two_ranks: RankPool,
    four_ranks: RankPool,
) -> None:
    """To the bit in fp32. In fp64 the SVD itself rounds by the place of a matrix in memory."""
    pool = two_ranks if len(shape) == 1 else four_ranks
    found = pool.run(decomposed, count, dtype, *shape)
    assert max(error for error, _ in found) <= limit
    assert max(taken for _, taken in found) == most


def train_with_a_drifting_replica(
    side: str, odd: int, error: float
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Disturb one replica's bases as another machine's rounding would."""
    original, lines = stack.randomized_svd, []

    def disturbed(*args: Any) -> Any:
        svd = original(*args)
        if dist.get_rank() == odd:
            getattr(svd, side)[0].view(-1)[0] += error
        return svd

    with (
        patch.object(stack, "randomized_svd", disturbed),
        patch.object(logger, "warning", lambda text, *rest: lines.append(text % rest)),
    ):
        return train(dist.get_world_size()), lines


@pytest.mark.parametrize(
    ("side", "odd", "error"),
    [
        ("U", 0, 1e-9),
        ("S", 1, 1e-9),
        ("V", 2, 1e-3),  # all would be wrong by more than the tolerance with its bases
    ],
)
def test_a_drifting_replica_is_repaired_and_told(
    side: str, odd: int, error: float, four_ranks: RankPool
) -> None:
    results = four_ranks.run(train_with_a_drifting_replica, side, odd, error)
    expected = train(1)
    first, _ = results[0]
    for weights, lines in results:
        assert lines and all("Replicas computed different bases" in line for line in lines)
        assert "0.weight" in lines[0]
        for name, weight in weights.items():
            assert torch.equal(weight, first[name])
            # All take the first replica's bases, which may be the disturbed ones.
            limit = 1e-10 if odd else 1e-6
            torch.testing.assert_close(weight, expected[name], rtol=limit, atol=limit)
