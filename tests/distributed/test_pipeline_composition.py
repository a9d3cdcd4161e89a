# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pipelines with everything else: plans, data parallelism, checkpointing, compilation, resuming."""

from functools import cache
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import (
    BF16,
    DEEP,
    EXACT,
    LAYOUTS,
    ROUNDING,
    bf16_references,
    degrees,
    flavor,
    largest_difference,
    model,
    rounding_excess,
    schedule,
)
from tests.support.rank_pool import RankPool

PP2_TP2 = LAYOUTS["pp2_tp2"][1]
PP2_FSDP2 = LAYOUTS["fsdp2_pp2"][1]
REPLICATE2 = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=1",
]
LOW_RANK = ["--activation_checkpoint.mode=low_rank"]
FULL = ["--activation_checkpoint.mode=full"]
COMPILE = ["--compile.enable", "--compile.backend=eager"]
ZBV = schedule("ZBVZeroBubble")
INTERLEAVED = schedule("Interleaved1F1B")


@pytest.fixture(scope="module")
def reference(one_rank: RankPool) -> Any:
    @cache
    def run(family: str, *options: str) -> dict[str, Any]:
        return one_rank.run(train, [*model(family), *degrees(), *options])[0]

    return run


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("lax", [*PP2_TP2, "--parallelism.tp_comm=sequence"]),
        ("lax", [*PP2_TP2, "--parallelism.tp_plan=vanilla", *ZBV]),
        ("lax", [*PP2_TP2, "--parallelism.tp_plan=vanilla_replicated", *INTERLEAVED]),
        ("lax", [*PP2_TP2, "--parallelism.no_tp_grouping", "--parallelism.tp_norm=sync"]),
        ("cola", [*PP2_TP2, "--parallelism.tp_head=scatter", "--parallelism.tp_comm=sequence"]),
        ("lax", [*PP2_TP2, *LOW_RANK]),
        ("cola", [*PP2_FSDP2, *FULL, *INTERLEAVED]),
        ("cola", [*PP2_TP2, *COMPILE, *LOW_RANK, *INTERLEAVED]),
        ("lax", [*degrees(pipeline=2, local_batch=2), *REPLICATE2]),
        ("cola", [*PP2_FSDP2, "--parallelism.fsdp_reshard_after_forward=always"]),
        ("lax", [*PP2_TP2, "--parallelism.pipeline_parallel_microbatch_size=1"]),
        ("lax", [*PP2_TP2, "--low_rank.lax_gate=scalar", *ZBV]),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(o.split(".")[-1] for o in value)
    ),
)
def test_layout_equals_one_process(
    family: str, options: list[str], four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model(family), *options])[0]
    gated = [option for option in options if "lax_gate" in option]
    assert largest_difference(run, reference(family, *flavor(options), *gated)) < EXACT


@pytest.mark.parametrize(
    "options",
    [
        # HSDP, with accumulation
        [*degrees(pipeline=2, local_batch=1), "--parallelism.data_parallel_replicate_degree=2"],
        # FSDP2 with tensor parallelism
        [*degrees(tensor=2, pipeline=2, local_batch=4), *ZBV],
    ],
    ids=["hsdp", "fsdp_tp"],
)
def test_three_dimensions(options: list[str], eight_ranks: RankPool, reference: Any) -> None:
    one = (
        ["--parallelism.pipeline_parallel_schedule=GPipe"] if "batch_size=1" in str(options) else []
    )
    run = eight_ranks.run(train, [*model("lax"), *options, *one])[0]
    assert largest_difference(run, reference("lax", *flavor(options))) < EXACT


def test_mixed_precision_is_the_same_regime(four_ranks: RankPool, one_rank: RankPool) -> None:
    references = bf16_references(one_rank, [*model("lax"), *degrees(), *DEEP], train)
    for layout in (LAYOUTS["pp4"][1], PP2_FSDP2):
        run = four_ranks.run(train, [*model("lax"), *layout, *DEEP, *BF16])[0]
        assert rounding_excess(run, references) < ROUNDING, layout


def test_a_checkpoint_moves_between_layouts(four_ranks: RankPool, reference: Any) -> None:
    """PP4 -> PP2 x TP2 (V-shaped) -> FSDP4 -> PP2 x FSDP2, stopped by a signal each time."""
    steps = [*DEEP, "--training.steps=4"]
    options = [*model("lax"), *steps, "--checkpoint.enable", "--checkpoint.interval=1"]
    stopped = four_ranks.run(train, [*options, *LAYOUTS["pp4"][1]], "sigterm@1")
    assert [run["step"] for run in stopped] == [1, 1, 1, 1]
    folder = stopped[0]["dump_folder"]
    second = four_ranks.run(train, [*options, *PP2_TP2, *ZBV], "sigterm@2", folder)[0]
    assert second["step"] == 2
    fsdp = four_ranks.run(train, [*options, "--training.local_batch_size=2"], "sigterm@3", folder)
    assert fsdp[0]["step"] == 3
    run = four_ranks.run(train, [*options, *PP2_FSDP2], "", folder)[0]
    assert run["step"] == 4
    assert largest_difference(run, reference("lax", *steps)) < EXACT
