# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every data-parallel layout trains like one process with the same global batch (fp32)."""

from functools import cache
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.training import largest_difference, train

FAMILIES = ["full", "svd", "cola", "lax"]
TOLERANCE = 1e-5

LAYOUTS = {
    "fsdp4": ["--parallelism.data_parallel_shard_degree=4", "--training.local_batch_size=2"],
    "hsdp2x2": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--training.local_batch_size=2",
    ],
    "replicate4": [
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
        "--training.local_batch_size=2",
    ],
    "fsdp4_accumulate2": [
        "--parallelism.data_parallel_shard_degree=4",
        "--training.local_batch_size=1",
    ],
    "hsdp2x2_accumulate2": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--training.local_batch_size=1",
    ],
    "replicate4_accumulate2": [
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
        "--training.local_batch_size=1",
    ],
}


def model(family: str) -> list[str]:
    return [f"--model.name=llama_{family}"]


@pytest.fixture(scope="session")
def reference(one_rank: RankPool) -> Any:
    @cache
    def run(family: str) -> dict[str, Any]:
        return one_rank.run(train, [*model(family), "--training.local_batch_size=8"])[0]

    return run


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(
    family: str, layout: str, four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model(family), *LAYOUTS[layout]])[0]
    assert largest_difference(run, reference(family)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulation_on_one_process(family: str, one_rank: RankPool, reference: Any) -> None:
    run = one_rank.run(train, [*model(family), "--training.local_batch_size=2"])[0]
    assert largest_difference(run, reference(family)) < TOLERANCE


def test_averaged_gradients_are_noticed(four_ranks: RankPool, reference: Any) -> None:
    run = four_ranks.run(train, [*model("cola"), *LAYOUTS["replicate4"]], "average")[0]
    assert largest_difference(run, reference("cola")) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        ["--activation_checkpoint.mode=full"],
        [
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
        ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
        ["--compile.enable"],
    ],
    ids=["full_ac", "op_ac", "layer_ac", "compile"],
)
def test_memory_and_speed_options_change_nothing(
    options: list[str], four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model("lax"), *LAYOUTS["fsdp4"], *options])[0]
    assert largest_difference(run, reference("lax")) < TOLERANCE


def test_bf16_regimes_stay_near_fp32(four_ranks: RankPool, reference: Any) -> None:
    exact = reference("cola")["losses"]
    mixed = four_ranks.run(
        train,
        [*model("cola"), *LAYOUTS["fsdp4"], "--training.mixed_precision_param=bfloat16"],
    )[0]
    pure = four_ranks.run(
        train,
        [
            *model("cola"),
            *LAYOUTS["replicate4"],
            "--training.mixed_precision_param=bfloat16",
            "--training.dtype=bfloat16",
        ],
    )[0]
    for losses in (mixed["losses"], pure["losses"]):
        assert losses != exact
        assert losses == pytest.approx(exact, rel=2e-2)


def test_one_rank_has_the_same_mixed_precision(one_rank: RankPool, four_ranks: RankPool) -> None:
    options = [*model("cola"), "--training.mixed_precision_param=bfloat16"]
    alone = one_rank.run(train, [*options, "--training.local_batch_size=8"])[0]
    sharded = four_ranks.run(train, [*options, *LAYOUTS["fsdp4"]])[0]
    assert alone["losses"][0] == pytest.approx(sharded["losses"][0], rel=1e-5)
    assert alone["losses"] == pytest.approx(sharded["losses"], rel=2e-3)
