# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weight decay of B A in every layout, against one process."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import torchtitan_lr.training.register  # noqa: F401
from tests.distributed.training import train
from tests.support.parity_runs import LAYOUTS, TINY, largest_difference, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.estimate.run import read_run
from torchtitan_lr.estimate.traffic import step_traffic

DECAY = ["--optimizer.weight_decay=2.0", "--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0"]
PRODUCTS = [*model("cola"), *DECAY, "--optimizer.weight_decay_on=products"]
TSR = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=8", "--optimizer.tsr_embedding_rank=8"]
MUON = ["--optimizer.name=Muon", "--optimizer.lr=2e-3"]
VANILLA = ["--parallelism.tp_plan=vanilla"]
# r (r + 1) / 2 numbers of each of the 8 factors of attention and the 6 of feed-forward, by hand.
BLOCK = 8 * 12 * 13 // 2 + 6 * 20 * 21 // 2


@pytest.mark.parametrize(
    ("layout", "options", "sent"),
    [
        ("fsdp2_tp2", [], {("all_reduce", "fsdp_tp"): 2 * BLOCK}),
        ("fsdp2_tp2", VANILLA, None),  # both factors are gathered
        ("pp2_tp2", ["--training.max_norm=inf"], {("all_reduce", "tp"): BLOCK}),
        # Muon shares out its own Gram matrices, over the same group.
        (
            "fsdp2_tp2",
            MUON,
            {(op, "fsdp_tp"): 2 * BLOCK for op in ("all_reduce", "reduce_scatter", "all_gather")},
        ),
        ("fsdp2_pp2", TSR, {("all_reduce", "fsdp"): BLOCK}),
    ],
)
def test_every_layout_is_one_process(
    layout: str,
    options: list[str],
    sent: dict[tuple[str, str], int] | None,
    reference: Callable[..., dict[str, Any]],
    four_ranks: RankPool,
) -> None:
    """To the last digits, and with the messages of the formula."""
    arguments = [*PRODUCTS, *LAYOUTS[layout][1], *options]
    run = four_ranks.run(train, [*arguments, "--metrics.comm_ledger"])[0]
    alone = [option for option in options if option not in VANILLA]
    assert largest_difference(run, reference(*PRODUCTS, *alone)) < 1e-12
    of_matrices = reference(*model("cola"), *DECAY, *alone, "--optimizer.weight_decay_on=matrices")
    assert largest_difference(run, of_matrices) > 1e-4

    counted: Counter[tuple[str, str]] = Counter()
    for row in run["ledger"]:
        if row["scope"] == "optimizer":
            counted[row["op"], row["mesh_dim"]] += row["elements"]
    expected: Counter[tuple[str, str]] = Counter()
    for formula in step_traffic(read_run(build_job_config([*TINY, *arguments]), 4), 0):
        if formula.scope == "optimizer":
            expected[formula.op, formula.mesh_dim] += formula.elements
    assert counted == expected
    assert sent is None or counted == sent
