# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from collections import Counter

import pytest

from torchtitan_lr.optim.tsr.selection import EMBEDDING, HEAD, TSRSettings, plan_matrices

SHAPES = {
    EMBEDDING: (64, 16),
    **{f"layers.{i}.attention.wq.weight": (16, 16) for i in range(4)},
    "layers.0.feed_forward.w1.weight": (40, 16),
    "layers.0.ffn_norm.weight": (16,),
    "gate": (1,),
    HEAD: (64, 16),
}
BASE = TSRSettings(rank=4, embedding_rank=3, refresh_interval=10, embedding_refresh_interval=5)


def change(**values):
    return TSRSettings(**{**BASE.__dict__, **values})


def test_matrices_but_for_the_head_are_compressed():
    plans = plan_matrices(SHAPES, BASE)
    assert set(plans) == {n for n, s in SHAPES.items() if len(s) == 2} - {HEAD}
    assert (plans[EMBEDDING].rank, plans[EMBEDDING].interval, plans[EMBEDDING].width) == (3, 5, 8)
    assert HEAD in plan_matrices(SHAPES, change(compress_head=True))
    assert EMBEDDING not in plan_matrices(SHAPES, change(embedding_rank=0))


def test_one_sided_projects_the_shorter_side():
    plans = plan_matrices(SHAPES, change(projection="one_sided"))
    tall = plans["layers.0.feed_forward.w1.weight"]
    assert tall.transposed and (tall.rows, tall.columns) == (16, 40)
    assert not plan_matrices(SHAPES, BASE)[tall.name].transposed
    # A square matrix is projected on the right, as one that is taller than wide; not a wide one.
    assert plans["layers.0.attention.wq.weight"].transposed
    wide = plan_matrices({"w2.weight": (16, 40)}, change(projection="one_sided"))["w2.weight"]
    assert not wide.transposed and (wide.rows, wide.columns) == (16, 40)


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
