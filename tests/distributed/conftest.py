# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rank pools shared by all multi-rank tests; the first test that uses one starts it."""

from collections.abc import Iterator

import pytest

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
    """Two gloo ranks."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    """Eight gloo ranks."""
    yield from _pool(8)
