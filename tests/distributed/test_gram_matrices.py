# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gram matrices over ranks: rows that they gather, and sums that are not rounded."""

from typing import Any

import numpy as np

from tests.distributed.training import train
from tests.support.parity_runs import degrees, largest_difference, model
from tests.support.rank_pool import RankPool

BF16_UNIT = 2**-7
"""One unit in the last place of a bf16 number, at most, in units of the number."""


def test_bf16_parameters_are_rounded_as_in_one_process(
    four_ranks: RankPool, reference: Any
) -> None:
    """All is fp64 but Gram matrices, fp32. In bf16 3% of the weights differ, 41% of Muon's."""
    arguments = [*model("cola"), "--optimizer.name=LoRAMuon", "--optimizer.lr=1e-2"]
    arguments += ["--optimizer.adamw_lr=1e-3", "--training.dtype=bfloat16", "--training.steps=3"]
    run = four_ranks.run(train, [*arguments, *degrees(tensor=2, local_batch=4)])[0]
    alone = reference(*arguments)
    assert largest_difference(run, alone) <= BF16_UNIT
    differ = [(run["parameters"][n] != w).ravel() for n, w in alone["parameters"].items()]
    share = np.concatenate(differ).mean()
    assert share < 0.01
