# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Combinations drawn from the README's table train like one process."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.training import largest_difference, train
from tests.support_matrix import Combination, SupportMatrix, world_size

MATRIX = SupportMatrix()
ONE = ["--training.steps=1", "--lr_scheduler.warmup_steps=0"]
DRAWS = MATRIX.ci_draws()


def name(combination: Combination) -> str:
    return "-".join(value for value in combination.values() if value != "none")


@pytest.fixture(scope="module")
def pool(four_ranks: RankPool, one_rank: RankPool) -> Iterator[Callable[[int], RankPool]]:
    """A pool of a number of ranks; one at a time beside the shared ones."""
    pools = {4: four_ranks, 1: one_rank}

    def of(ranks: int) -> RankPool:
        return pools.setdefault(ranks, RankPool(ranks))

    yield of
    for ranks in pools.keys() - {1, 4}:
        pools[ranks].close()


@pytest.fixture(scope="module")
def reference(one_rank: RankPool) -> Any:
    @cache
    def run(*arguments: str) -> dict[str, Any]:
        return one_rank.run(train, [*arguments, *ONE])[0]

    return run


@pytest.mark.parametrize("combination", DRAWS, ids=name)
def test_a_combination_trains_like_one_process(
    combination: Combination, pool: Callable[[int], RankPool], reference: Any
) -> None:
    ranks = pool(world_size(combination))
    run = ranks.run(train, [*MATRIX.arguments(combination, "eager"), *ONE])[0]
    expected = reference(*MATRIX.reference(combination))
    if combination["precision"] == "bf16":
        assert run["losses"] == pytest.approx(expected["losses"], rel=5e-3)
        assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=5e-2)
    else:
        assert largest_difference(run, expected) < 1e-5


def test_another_family_would_be_noticed(reference: Any) -> None:
    """The control: a difference that is no rounding is far above the tolerance."""
    families = [
        reference(*MATRIX.reference(DRAWS[0] | {"family": family, "precision": "none"}))
        for family in ("cola", "lax")
    ]
    assert largest_difference(*families) > 1e-3
