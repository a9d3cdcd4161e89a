# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs of models with lanes: every layout trains like one process, and goes on in another."""

from typing import Any

import pytest

from tests.distributed.training import train
from tests.distributed.tsr_runs import LAYOUTS as TSR_LAYOUTS
from tests.distributed.tsr_runs import TSR
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    CAAT,
    EXACT,
    LAYOUTS,
    flavor,
    largest_difference,
    schedule,
)
from tests.support.rank_pool import RankPool

TP2, TP4 = LAYOUTS["fsdp2_tp2"][1], LAYOUTS["tp4"][1]
PP2_TP2, PP2_FSDP2 = LAYOUTS["pp2_tp2"][1], LAYOUTS["fsdp2_pp2"][1]
REPLICATE2_ACCUMULATE2 = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
    "--training.local_batch_size=2",
]
VALIDATED = ["--validation.enable", "--validation.steps=1", "--validation.seq_len=16"]
COMPILE = ["--compile.enable", "--compile.backend=eager"]
SAVED = ["--checkpoint.enable", "--checkpoint.interval=1"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (CAAT, [*TP4, *VALIDATED]),
        *nightly((CAAT, [*TP2, "--parallelism.disable_loss_parallel"])),
        (CAAT, [*TP2, *REPLICATE2_ACCUMULATE2]),
        *nightly((CAAT, PP2_TP2)),
        (CAAT, [*PP2_TP2, *schedule("ZBVZeroBubble")]),
        *nightly((CAAT, PP2_FSDP2)),
        *nightly((CAAT, [*TP2, "--activation_checkpoint.mode=full"])),
        *nightly((CAAT, [*PP2_TP2, "--activation_checkpoint.mode=selective"])),
        *nightly((CAAT, [*TP4, *COMPILE, *VALIDATED])),
    ],
    ids=lambda value: "-".join(option.split(".")[-1] for option in value),
)
def test_layout_equals_one_process(
    model: list[str], options: list[str], four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model, *options])[0]
    expected = reference(*model, *VALIDATED, *flavor(options))
    assert largest_difference(run, expected) < EXACT
    if "--validation.enable" in options:
        assert run["val_losses"] == pytest.approx(expected["val_losses"], rel=EXACT)


def test_tsr_adam_trains_lanes(four_ranks: RankPool, one_rank: RankPool) -> None:
    """An optimizer that reads the weights' placements."""
    run = four_ranks.run(train, [*CAAT, *TSR, *TSR_LAYOUTS["tp2xdp2"]])[0]
    alone = one_rank.run(train, [*CAAT, *TSR, *LAYOUTS["dp1"][1]])[0]
    assert largest_difference(run, alone) < EXACT


@pytest.mark.parametrize("how", ["resume", "weights"])
def test_a_checkpoint_of_other_lanes_is_refused(
    how: str, one_rank: RankPool, tmp_path_factory: Any
) -> None:
    base = tmp_path_factory.getbasetemp() / "lanes"
    one = [*CAAT, *LAYOUTS["dp1"][1], *SAVED, "--training.steps=1", "--lr_scheduler.warmup_steps=0"]
    if not base.exists():  # once for both cases
        one_rank.run(train, one, "", str(base))
    load, folder = [], str(base)
    if how == "weights":
        folder = ""
        load = [
            f"--checkpoint.initial_load_path={base}/checkpoint/step-1",
            "--checkpoint.initial_load_model_only",
        ]
    more = ["--training.steps=2", "--caat.lanes=2", *load]
    (error,) = one_rank.errors(train, [*one, *more], "", folder)
    assert "ConfigError: caat.lanes: got 2, expected 4" in error
