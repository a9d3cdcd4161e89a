# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The debug files have the same losses on any number of ranks."""

from typing import Any

import pytest

from tests.commands import ROOT
from tests.distributed.training import train
from tests.support.parity_runs import EXACT, TINY
from tests.support.rank_pool import RankPool
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.launch.placement import fit

SHORT = [*TINY, "--model.flavor=debug", "--training.global_batch_size=16"]


FILES: list[Any] = ["cola", "finetune", "tsr"]
FILES += [pytest.param(name, marks=pytest.mark.nightly) for name in ("full", "svd", "lax", "caat")]


@pytest.mark.parametrize("name", FILES)
def test_a_debug_file_has_the_same_losses_on_any_ranks(
    name: str, one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    arguments = [*SHORT, f"--job.config_file={ROOT}/train_configs/debug_{name}.toml"]
    config, losses = build_job_config(arguments), []
    for ranks, pool in ((1, one_rank), (2, two_ranks), (4, four_ranks)):
        fitted = fit(config, arguments, ranks)
        assert fitted is not None
        losses.append(pool.run(train, [*arguments, *fitted])[0]["losses"])
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=EXACT)
