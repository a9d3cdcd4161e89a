# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks that gather latents instead of keys and values train like one process (fp64)."""

from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import degrees, largest_difference, model
from tests.support.rank_pool import RankPool

EXACT = 1e-12
LATENTS = ["--parallelism.context_parallel_degree=2", "--parallelism.cp_gather=latents"]


@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_two_ranks(family: str, two_ranks: RankPool, reference: Any) -> None:
    run = two_ranks.run(train, [*model(family), *degrees(), *LATENTS])[0]
    assert largest_difference(run, reference(*model(family))) < EXACT
    print([r for r in run["ledger"] if r["scope"].startswith("block")])
