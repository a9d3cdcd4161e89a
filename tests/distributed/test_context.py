# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks that share the tokens of a row train like one process (fp64)."""

from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import degrees, largest_difference, model
from tests.support.rank_pool import RankPool

EXACT = 1e-12


def shared(degree: int, **others: int) -> list[str]:
    return [*degrees(**others), f"--parallelism.context_parallel_degree={degree}"]


@pytest.mark.parametrize("family", ["full", "cola"])
def test_two_ranks(family: str, two_ranks: RankPool, reference: Any) -> None:
    run = two_ranks.run(train, [*model(family), *shared(2)])[0]
    assert largest_difference(run, reference(*model(family))) < EXACT
