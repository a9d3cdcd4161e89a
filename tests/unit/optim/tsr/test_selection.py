# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from collections import Counter

import pytest

from torchtitan_lr.optim.tsr.selection import EMBEDDING, TSRSettings, plan_matrices

SHAPES = {
    EMBEDDING: (64, 16),
    **{f"layers.{i}.attention.wq.weight": (16, 16) for i in range(4)},
    "layers.0.feed_forward.w1.weight": (40, 16),
    "layers.0.ffn_norm.weight": (16,),
    "gate": (1,),
}
BASE = TSRSettings(rank=4, embedding_rank=3, refresh_interval=10, embedding_refresh_interval=5)


def change(**values):
    return TSRSettings(**{**BASE.__dict__, **values})


@pytest.mark.parametrize("start", ["gradient", "random"])
def test_staggered_refreshes_take_their_turn(start):
    """Bases of the gradient are needed in the first step; random ones wait for their turn."""
    plans = plan_matrices(SHAPES, change(stagger=True, start=start)).values()
    linear = [plan for plan in plans if plan.name != EMBEDDING]
    counts = Counter(step for plan in linear for step in range(1, 11) if plan.is_due(step, 1))
    assert sorted(counts.values()) == [1] * len(linear)
    assert all(plan.is_due(step=3, refreshes=0) for plan in plans) is (start == "gradient")
    for plan in plans if start == "random" else ():
        assert [plan.is_due(step, 0) for step in range(20)] == [
            plan.is_due(step, 1) for step in range(20)
        ]
    together = plan_matrices(SHAPES, BASE).values()
    assert all(plan.is_due(10, 1) and not plan.is_due(9, 1) for plan in together)
