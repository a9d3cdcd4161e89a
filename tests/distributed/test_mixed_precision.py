# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""In bf16 every layout rounds as one process does, in the same regime: fp32 masters and sums."""

import pytest

from tests.distributed.data_layouts import LAYOUTS as DATA
from tests.distributed.training import LOSS_GAP, loss_gap, train
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    BF16,
    CAAT,
    DEEP,
    LAYOUTS,
    ROUNDING,
    bf16_references,
    degrees,
    model,
    rounding_excess,
)
from tests.support.rank_pool import RankPool

PURE = [*BF16, "--training.dtype=bfloat16"]
TP2, TP4, PP2 = (LAYOUTS[name][1] for name in ("fsdp2_tp2", "tp4", "fsdp2_pp2"))
SEQUENCE = ["--parallelism.tp_comm=sequence"]
# In the fixed order: in the shuffled one, batches are alike and the controls are weaker.
COLA = [*model("cola"), "--training.no_shuffle"]

CASES = {
    "data": (COLA, [DATA["fsdp4"], DATA["replicate4_accumulate2"]]),
    "tensors": (model("cola"), [TP4, [*TP2, *SEQUENCE]]),
    "stages": ([*model("lax"), *DEEP], [LAYOUTS["pp4"][1], PP2]),
    "lanes": (CAAT, [TP4, [*TP2, "--caat.backward_sum=activation"]]),
}


@pytest.mark.parametrize("case", ["data", "tensors", *nightly("stages", "lanes")])
def test_the_regime_is_that_of_one_process(
    case: str, four_ranks: RankPool, one_rank: RankPool
) -> None:
    arguments, layouts = CASES[case]
    references = bf16_references(one_rank, [*arguments, *degrees()], train)
    for layout in layouts:
        run = four_ranks.run(train, [*arguments, *BF16, *layout])[0]
        assert rounding_excess(run, references) < ROUNDING, layout
    if case == "data":
        half = [*BF16, "--training.mixed_precision_reduce=bfloat16", *DATA["hsdp2x2_accumulate2"]]
        run = four_ranks.run(train, [*arguments, *half])[0]
        assert rounding_excess(run, references) < ROUNDING
        # The control: master weights in bf16 are another regime.
        pure = one_rank.run(train, [*arguments, *PURE, *degrees()])[0]
        assert rounding_excess(pure, references) > 5 * ROUNDING


def test_pure_bf16_replicas_train_like_one_process(
    four_ranks: RankPool, one_rank: RankPool
) -> None:
    """bf16 master weights round every update, so losses are compared, not weights."""
    options = [*model("cola"), *PURE, "--training.steps=5", "--optimizer.lr=1e-2"]
    alone = one_rank.run(train, [*options, *degrees()])[0]["losses"]
    run = four_ranks.run(train, [*options, *DATA["replicate4"]])[0]["losses"]
    assert loss_gap(run, alone) < LOSS_GAP
