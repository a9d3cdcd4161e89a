# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pipelines on paper: known bubbles, micro-batches in flight, and schedules that cannot end."""

import pytest
from torch.distributed.pipelining import schedules

from torchtitan_lr.costs.schedule import StageSeconds, makespan, most_in_flight, pipeline_order

RANKS, MICROBATCHES = 4, 8


def bubble(name, stages_per_rank=1, backward=2.0):
    orders = pipeline_order(name, RANKS, stages_per_rank, MICROBATCHES)
    seconds = [StageSeconds(1.0, backward)] * (RANKS * stages_per_rank)
    busy = MICROBATCHES * stages_per_rank * (1 + backward)
    return makespan(orders, seconds) - busy


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_bubble_of_equal_stages(name):
    assert bubble(name) == (RANKS - 1) * (1 + 2)


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_the_order_is_torchs(name):
    kind = getattr(schedules, f"Schedule{name}")
    empty = object.__new__(kind)
    empty.__dict__.update(_num_stages=RANKS, _n_microbatches=MICROBATCHES)
    theirs = empty._get_pipeline_order()
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for rank, ours in enumerate(pipeline_order(name, RANKS, 1, MICROBATCHES)):
        names = [action.computation_type.name for action in theirs[rank] if action is not None]
        kinds = [letters[name] for name in names if name in letters]
        assert [action.kind for action in ours] == kinds and len(kinds) == 2 * MICROBATCHES


def test_in_flight():
    one = [
        most_in_flight(order, {p: 10.0})
        for p, order in enumerate(pipeline_order("1F1B", RANKS, 1, MICROBATCHES))
    ]
    assert one == [(40.0, 4), (30.0, 3), (20.0, 2), (10.0, 1)]
    all_of_them = pipeline_order("GPipe", RANKS, 1, MICROBATCHES)[3]
    assert most_in_flight(all_of_them, {3: 10.0}) == (80.0, 8)
    # Two stages on the first rank: the warm-up of both, and the V holds as much on every rank.
    interleaved = pipeline_order("Interleaved1F1B", RANKS, 2, MICROBATCHES)[0]
    assert most_in_flight(interleaved, {0: 1.0, 4: 1.0})[1] == 4 + 2 * 3 + 1
    v = pipeline_order("ZBVZeroBubble", RANKS, 2, MICROBATCHES)
    counts = [most_in_flight(order, {p: 1.0, 7 - p: 1.0})[1] for p, order in enumerate(v)]
    assert counts == [2 * RANKS] * RANKS
