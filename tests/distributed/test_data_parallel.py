# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every data-parallel layout trains like one process with the same global batch (fp64)."""

from functools import cache
from typing import Any

import pytest

from tests.distributed.training import LOSS_GAP, loss_gap, train
from tests.support.parity_runs import (
    BF16,
    EXACT,
    ROUNDING,
    bf16_references,
    largest_difference,
    rounding_excess,
)
from tests.support.rank_pool import RankPool

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


PURE = [*BF16, "--training.dtype=bfloat16"]

# Data parallelism wraps whole blocks, whatever is in them: the family with the most inputs a block
# meets every layout, each other family two.
PAIRS = [
    *(("lax", layout) for layout in LAYOUTS),
    ("full", "fsdp4_accumulate2"),
    ("full", "replicate4"),
    ("svd", "hsdp2x2_accumulate2"),
    ("svd", "fsdp4"),
    ("cola", "replicate4_accumulate2"),
    ("cola", "hsdp2x2"),
]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_layout_equals_one_process(
    family: str, layout: str, four_ranks: RankPool, reference: Any
) -> None:
    run = four_ranks.run(train, [*model(family), *LAYOUTS[layout]])[0]
    assert largest_difference(run, reference(family)) < EXACT


@pytest.mark.parametrize("family", ["full", "lax"])
def test_accumulation_on_one_process(family: str, one_rank: RankPool, reference: Any) -> None:
    run = one_rank.run(train, [*model(family), "--training.local_batch_size=2"])[0]
    assert largest_difference(run, reference(family)) < EXACT


def test_averaged_gradients_are_noticed(four_ranks: RankPool, reference: Any) -> None:
    """The control: torchtitan's own replication divides gradients by the ranks once more."""
    run = four_ranks.run(train, [*model("cola"), *LAYOUTS["replicate4"]], "average")[0]
    assert largest_difference(run, reference("cola")) > 1e-2


def test_mixed_precision_is_the_same_regime_in_every_layout(
    four_ranks: RankPool, one_rank: RankPool
) -> None:
    # In the fixed order: in the shuffled one, batches are alike and the controls are weaker.
    cola = [*model("cola"), "--training.no_shuffle"]
    references = bf16_references(one_rank, [*cola, "--training.local_batch_size=8"], train)
    for layout in ("fsdp4", "replicate4_accumulate2"):
        run = four_ranks.run(train, [*cola, *LAYOUTS[layout], *BF16])[0]
        assert rounding_excess(run, references) < ROUNDING, layout
    # The controls: master weights in bf16 are another regime, and a fault shows in this one.
    pure = one_rank.run(train, [*cola, *PURE, "--training.local_batch_size=8"])[0]
    assert rounding_excess(pure, references) > 5 * ROUNDING
    average = [*cola, *LAYOUTS["replicate4"], *BF16]
    faulty = four_ranks.run(train, average, "average")[0]
    assert rounding_excess(faulty, references) > 2 * ROUNDING


def test_pure_bf16_replicas_train_like_one_process(
    four_ranks: RankPool, one_rank: RankPool
) -> None:
    """bf16 master weights round every update, so losses are compared, not weights."""
    options = [*model("cola"), "--training.steps=5", "--optimizer.lr=1e-2"]
    alone = one_rank.run(train, [*options, *PURE, "--training.local_batch_size=8"])[0]["losses"]
    run = four_ranks.run(train, [*options, *PURE, *LAYOUTS["replicate4"]])[0]["losses"]
    assert loss_gap(run, alone) < LOSS_GAP
    # The control: gradients divided by the ranks once more.
    average = four_ranks.run(train, [*options, *PURE, *LAYOUTS["replicate4"]], "average")[0]
    assert loss_gap(average["losses"], alone) > 10 * LOSS_GAP
