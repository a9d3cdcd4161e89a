# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weight decay of B A in every layout, against one process."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import LAYOUTS, largest_difference, model
from tests.support.rank_pool import RankPool

DECAY = ["--optimizer.weight_decay=2.0", "--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0"]
PRODUCTS = [*model("cola"), *DECAY, "--optimizer.weight_decay_on=products"]
VANILLA = ["--parallelism.tp_plan=vanilla"]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("fsdp2_tp2", []),  # A is gathered over FSDP's ranks
        ("fsdp2_tp2", VANILLA),  # both factors are gathered
        ("pp2_tp2", ["--training.max_norm=inf"]),  # two stages
        ("tp4", []),
    ],
)
def test_every_layout_is_one_process(
    layout: str,
    options: list[str],
    reference: Callable[..., dict[str, Any]],
    four_ranks: RankPool,
) -> None:
    run = four_ranks.run(train, [*PRODUCTS, *LAYOUTS[layout][1], *options])[0]
    common = [option for option in options if "max_norm" in option]
    assert largest_difference(run, reference(*PRODUCTS, *common)) < 1e-12
    of_matrices = reference(*model("cola"), *DECAY, *common, "--optimizer.weight_decay_on=matrices")
    assert largest_difference(run, of_matrices) > 1e-4
