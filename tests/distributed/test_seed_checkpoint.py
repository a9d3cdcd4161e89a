# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every layout starts from the weights of a seed checkpoint."""

from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    DEEP,
    EXACT,
    LAYOUTS,
    TINY,
    largest_difference,
    model,
    write_seed_checkpoint,
)
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory: pytest.TempPathFactory, one_rank: RankPool) -> str:
    """The weights of LaX at step 0, written by the script's own function."""
    folder = tmp_path_factory.mktemp("seed")
    # Another seed than the runs', so that weights which are not loaded are noticed.
    options = [*TINY, *model("lax"), *DEEP, "--debug.seed=7", f"--job.dump_folder={folder}"]
    options += ["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=8"]
    path: str = one_rank.run(write_seed_checkpoint, options)[0]
    assert path == str(folder / "checkpoint/step-0")
    return path


@pytest.mark.parametrize("layout", ["pp4", *nightly("pp2_tp2"), "fsdp2_pp2"])
def test_layouts_from_a_seed_checkpoint(
    layout: str, seed_checkpoint: str, four_ranks: RankPool, reference: Any
) -> None:
    seed = ["--checkpoint.enable", f"--checkpoint.initial_load_path={seed_checkpoint}"]
    ranks, options = LAYOUTS[layout]
    assert ranks == 4
    run = four_ranks.run(train, [*model("lax"), *options, *DEEP, *seed])[0]
    assert largest_difference(run, reference(*model("lax"), *DEEP, *seed)) < EXACT
    assert largest_difference(run, reference(*model("lax"), *DEEP)) > 1e-3
