# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whole training runs under tensor parallelism equal those of one process (fp64).

The mathematics of each plan is proven module by module in the parity tests; here the plans meet the
trainer: loss parallel, clipping, optimizer, FSDP2, HSDP, checkpointing, compilation, DCP.
"""

from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    EXACT,
    largest_difference,
    model,
)
from tests.support.rank_pool import RankPool

TP2 = ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=8"]
TP4 = ["--parallelism.tensor_parallel_degree=4", "--training.local_batch_size=8"]
TP2_FSDP2 = ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=4"]
TP2_REPLICATE2_ACCUMULATE2 = [
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
    "--training.local_batch_size=2",
]


# Validation compiles the same blocks once more, without gradients.
VALIDATED = ["--validation.enable", "--validation.steps=1", "--validation.seq_len=16"]
VALIDATED += ["--validation.first_step"]


@pytest.mark.parametrize(
    ("family", "plan"),
    [("svd", "btp"), *nightly(("lax", "btp"), ("svd", "vanilla"), ("full", "megatron"))],
)
def test_compiled_blocks_validate(family: str, plan: str, two_ranks: RankPool) -> None:
    options = [*model(family), *TP2, f"--parallelism.tp_plan={plan}", *VALIDATED]
    short = [*options, "--training.steps=1", "--lr_scheduler.warmup_steps=0"]
    eager = two_ranks.run(train, short)[0]
    compiled = two_ranks.run(train, [*short, "--compile.enable", "--compile.backend=eager"])[0]
    assert compiled["val_losses"] == pytest.approx(eager["val_losses"], rel=EXACT)
    assert largest_difference(compiled, eager) < EXACT


def test_sequence_form_falls_back_for_an_odd_validation_length(
    four_ranks: RankPool, reference: Any
) -> None:
    options = [*model("cola"), *TP2_FSDP2, "--parallelism.tp_comm=sequence", *VALIDATED]
    run = four_ranks.run(train, [*options, "--validation.seq_len=15"])[0]
    assert len(run["val_losses"]) == 2
    assert largest_difference(run, reference(*model("cola"))) < EXACT


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *nightly(("cola", TP4)),
        ("lax", [*TP2_FSDP2, "--parallelism.tp_comm=sequence"]),
        ("svd", [*TP2_REPLICATE2_ACCUMULATE2, "--parallelism.tp_norm=sync"]),
        ("cola", [*TP2_FSDP2, "--parallelism.no_tp_grouping"]),
        ("cola", [*TP2_FSDP2, "--parallelism.tp_plan=vanilla"]),
        *nightly(("lax", [*TP4, "--parallelism.tp_plan=vanilla_replicated"])),
        *nightly(("full", TP2_FSDP2)),
        *nightly(("full", [*TP4, "--parallelism.tp_comm=sequence"])),
        ("cola", [*TP4, "--parallelism.disable_loss_parallel"]),
        *nightly(("lax", [*TP2_FSDP2, "--activation_checkpoint.mode=low_rank"])),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(option.split(".")[-1] for option in value if "batch_size" not in option)
    ),
)
def test_layout_equals_one_process(
    family: str, options: list[str], four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model(family), *options])[0]
    assert largest_difference(run, reference(*model(family))) < EXACT


def test_hsdp_with_tensor_parallelism(eight_ranks: RankPool, reference: Any) -> None:
    options = [
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.data_parallel_replicate_degree=2",
        "--training.local_batch_size=2",
    ]
    run = eight_ranks.run(train, [*model("cola"), *options])[0]
    assert largest_difference(run, reference(*model("cola"))) < EXACT
