# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sixty-four ranks, of which most hold no row of a factor, train as one process (``--full``)."""

from typing import Any

import pytest

from tests.distributed.test_tsr_training import TSR
from tests.distributed.training import train
from tests.support.parity_runs import DEEP, EXACT, degrees, largest_difference, model, schedule
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.nightly

HSDP = "--parallelism.data_parallel_replicate_degree=8"
ADAMW = [
    [*degrees(local_batch=1), HSDP],
    [*degrees(tensor=4, local_batch=4), "--activation_checkpoint.mode=low_rank"],
    [*degrees(tensor=2, pipeline=2, local_batch=4), *schedule("ZBVZeroBubble")],
]
LAYOUTS = {"AdamW": ([], ADAMW), "TSR-Adam": (TSR, [degrees(local_batch=1), ADAMW[0], ADAMW[1]])}


@pytest.mark.parametrize(("options", "layouts"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_step_in_another_layout(
    options: list[str], layouts: list[list[str]], one_rank: RankPool
) -> None:
    """A signal stops the run in each layout but the last, and the next one goes on."""
    arguments = [*model("cola"), *DEEP, *options, "--training.steps=3"]
    arguments += ["--training.global_batch_size=64"]
    ranks, run = RankPool(64), dict[str, Any](dump_folder="")
    for step, layout in enumerate(layouts, 1):
        saving = [*arguments, *layout, "--checkpoint.enable", "--checkpoint.interval=9"]
        stop = f"sigterm@{step}" if step < 3 else ""
        run = ranks.run(train, saving, stop, run["dump_folder"], timeout=1800)[0]
        assert run["step"] == step
    ranks.close()
    assert largest_difference(run, one_rank.run(train, [*arguments, *degrees()])[0]) < EXACT
