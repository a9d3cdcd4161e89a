# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weights in bf16: another regime than fp32 masters, but the same in every layout."""

from tests.distributed.training import LOSS_GAP, loss_gap, train
from tests.support.parity_runs import BF16, degrees, model
from tests.support.rank_pool import RankPool

PURE = [*BF16, "--training.dtype=bfloat16"]
REPLICATE4 = [
    *degrees(local_batch=2),
    "--parallelism.data_parallel_replicate_degree=4",
    "--parallelism.data_parallel_shard_degree=1",
]


def test_pure_bf16_replicas_train_like_one_process(
    four_ranks: RankPool, one_rank: RankPool
) -> None:
    """bf16 master weights round every update, so losses are compared, not weights."""
    options = [*model("cola"), *PURE, "--training.steps=5", "--optimizer.lr=1e-2"]
    alone = one_rank.run(train, [*options, *degrees()])[0]["losses"]
    run = four_ranks.run(train, [*options, *REPLICATE4])[0]["losses"]
    assert loss_gap(run, alone) < LOSS_GAP


def test_tsr_adam_of_bf16_weights_keeps_fp32_states(four_ranks: RankPool) -> None:
    """Replicas of bf16 weights end equal in every bit, and the state is what it is elsewhere."""
    options = [*model("full"), *PURE, "--optimizer.name=TSRAdam", "--optimizer.tsr_rank=12"]
    runs = four_ranks.run(train, [*options, *REPLICATE4], "", "", True, True)
    assert runs[0]["state_dtypes"] == {"float32", "int64"}
    for name, value in runs[0]["parameters"].items():
        assert all((run["parameters"][name] == value).all() for run in runs), name
