# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rank pools shared by all multi-rank tests."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One rank: the reference every layout is compared with."""
    pool = RankPool(1)
    yield pool
    pool.close()
