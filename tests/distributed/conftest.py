# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rank pools shared by all multi-rank tests; the first test that uses one starts it."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import degrees
from tests.support.rank_pool import RankPool


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One rank: the reference every layout is compared with."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    yield from _pool(4)


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    yield from _pool(8)


@pytest.fixture(scope="session")
def reference(one_rank: RankPool) -> Callable[..., dict[str, Any]]:
    """What one process trains with these arguments, once for all tests."""

    @lru_cache(maxsize=32)
    def run(*arguments: str) -> dict[str, Any]:
        return one_rank.run(train, [*degrees(), *arguments])[0]

    return run
