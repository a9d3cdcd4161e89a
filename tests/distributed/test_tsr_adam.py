# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam on any mesh equals its one-process twin (fp64)."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.tsr_cases import (
    BASE,
    LAYOUTS,
    MAX_NORM,
    STEPS,
    Case,
    parity,
    place,
    train,
    twin,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.drift import differences
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.optim.tsr.svd import SVD

TOLERANCE = 1e-10
"""The twin computes UᵀGV on a refresh; its rounding off the diagonal is divided by Adam's ε."""

MULTI = [name for name in LAYOUTS if name != "alone"]
MOMENTS = [replace(BASE, moments=moments) for moments in ("keep", "rotate")]
OPTIONS = [
    replace(BASE, refresh="dense"),
    replace(BASE, refresh="auto", moments="keep"),
    replace(BASE, stagger=True),
    replace(BASE, stagger=True, start="random", compress_head=True),
    replace(BASE, projection="one_sided"),
    replace(BASE, projection="one_sided", moments="keep", refresh="dense"),
    replace(BASE, compress_head=True, overlap_buckets=3),
    replace(BASE, embedding_rank=0, power_iterations=0),
]
LAYOUTS_OF_OPTIONS = ("hsdp2x2", "tp2xdp2", "fsdp2xtp2")
CASES = [
    Case(layout, settings, micro)
    for layout in MULTI
    for kinds, counts in ((MOMENTS, (1, 4)), (OPTIONS, (2,)))
    for settings in kinds
    for micro in counts
]


def shared_out(case: Case) -> Any:
    """The layouts share the rules for the moments, accumulating; three share the options.

    With ``--full`` every layout meets everything.
    """
    turn = MULTI.index(case.layout) % len(MOMENTS)
    often = case.microbatches == 4 and case.settings == MOMENTS[turn]
    if case.settings in OPTIONS:
        turn = OPTIONS.index(case.settings) % len(LAYOUTS_OF_OPTIONS)
        often = case.layout == LAYOUTS_OF_OPTIONS[turn]
    return pytest.param(case, id=str(case), marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize("case", map(shared_out, CASES))
def test_equals_the_twin(case: Case, four_ranks: RankPool) -> None:
    for errors in four_ranks.run(parity, case):
        assert max(errors.values()) < TOLERANCE, errors


def norms_of(case: Case) -> list[float]:
    return train(case)[2]


@pytest.mark.parametrize("layout", ["hsdp2x2", "fsdp2xtp2"])
def test_every_rank_has_the_same_norm(layout: str, four_ranks: RankPool) -> None:
    first, *others = four_ranks.run(norms_of, Case(layout))
    assert len(first) == STEPS and max(first) > MAX_NORM > 0  # clipping happens
    assert all(norms == first for norms in others)


def train_with_a_drifting_replica(
    case: Case, side: str = "U", odd: int = 2, error: float = 1e-9
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Disturb one replica's bases as another machine's rounding would."""
    from torchtitan_lr.optim.tsr import refresh
    from torchtitan_lr.titan import logger

    layout, original, lines = place(case.layout), refresh.solve_together, []

    def disturbed(*args: Any) -> list[Any]:
        results = original(*args)
        for svd in results:
            if layout.replica[0] == odd and isinstance(svd, SVD):
                getattr(svd, side)[0].view(-1)[0] += error
        return results

    with (
        patch.object(refresh, "solve_together", disturbed),
        patch.object(logger, "warning", lambda text, *rest: lines.append(text % rest)),
    ):
        model, _, _ = train(case, layout)
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
    results = four_ranks.run(train_with_a_drifting_replica, Case("replicate4"), side, odd, error)
    expected, _ = twin(Case("replicate4"))
    first, _ = results[0]
    for weights, lines in results:
        assert lines and all("Replicas computed different bases" in line for line in lines)
        assert "layers.0.attention" in lines[0]
        for name, weight in weights.items():
            assert torch.equal(weight, first[name])
            # All take the first replica's bases, which may be the disturbed ones.
            limit = TOLERANCE if odd else 1e-6
            torch.testing.assert_close(weight, expected[name], rtol=limit, atol=limit)


def found_to_differ(odd: int, which: int) -> list[int]:
    """Compare two batches, of which one rank has another tensor in the second one."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    batches = [[torch.randn(3, 4, generator=generator) for _ in range(3)] for _ in range(2)]
    if rank == odd:
        batches[1][which][2, 1] += 1
    group = dist.group.WORLD
    assert group is not None
    return differences(batches, group).nonzero().flatten().tolist()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("odd", [0, 3])
def test_every_replica_sees_that_one_differs(which: int, odd: int, four_ranks: RankPool) -> None:
    assert four_ranks.run(found_to_differ, odd, which) == [[1]] * 4


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
