# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The rank that the others wait for is named, though all take the same time for a step."""

from pathlib import Path

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import degrees, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.training import history

SHARDS = degrees(local_batch=2)
TENSOR = degrees(tensor=2, local_batch=2)
STAGES = [*degrees(pipeline=2, local_batch=2), "--parallelism.data_parallel_shard_degree=2"]


@pytest.mark.parametrize(
    ("layout", "named"),
    # Tensor-parallel ranks wait for one another within a block: the first stands for both.
    [(SHARDS, 1), (TENSOR, 0), (STAGES, 1)],
    ids=["shards", "tensor", "stages"],
)
def test_the_slowest_rank_is_named(layout: list[str], named: int, four_ranks: RankPool) -> None:
    options = [*model("cola"), *layout, "--training.steps=2"]
    folder = four_ranks.run(train, options, "slow@2")[0]["dump_folder"]
    record = history.read_history(Path(folder) / history.HISTORY_FILE)[-1]
    assert record["step"] == 2 and record[history.SLOWEST_RANK] == named
    assert record[history.SLOWEST_BEHIND] > 60  # of .1 s, where blocks take milliseconds
