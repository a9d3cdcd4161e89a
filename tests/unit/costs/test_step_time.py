# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model of a step's time by hand, and pipelines on paper: bubbles, micro-batches in flight.

The model beside what one GPU took: each row of docs/data is within 15%, or has a reason.
"""

import json
from dataclasses import replace

import pytest
from torch.distributed.pipelining import schedules

from scripts.bench import modelled
from tests.support.nightly import nightly
from torchtitan_lr.costs import step_time
from torchtitan_lr.costs.hardware import Hardware, MeshDim
from torchtitan_lr.costs.kernels import Work, product_work
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.schedule import makespan, most_in_flight, pipeline_order
from torchtitan_lr.costs.step_time import product_seconds

MACHINE = Hardware("test", 100.0, 0.5, 80.0, 8, 100.0, 10.0, 10.0)
MESH = {"tp": MeshDim(8, 1), "fsdp": MeshDim(4, 8), "pp": MeshDim(2, 32)}
MILLION = 10**6
HALF = dict.fromkeys(("activation", "parameter"), "bfloat16")


def row(op, role="activation", dim="tp", pass_="forward", calls=1, elements=MILLION):
    return Traffic("block 0", pass_, op, role, calls, elements, dim)


@pytest.mark.parametrize(
    ("op", "share"),
    [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("send", 1.0)],
)
def test_collective(op, share):
    seconds = step_time.collective_seconds(row(op, calls=3), 2, MESH["tp"], MACHINE)
    assert seconds == pytest.approx(3 * 10e-6 + share * 2e6 / 100e9)


def test_links():
    inside = step_time.collective_seconds(row("all_gather"), 2, MeshDim(4, 1), MACHINE)
    between = step_time.collective_seconds(row("all_gather"), 2, MeshDim(4, 8), MACHINE)
    assert between - 10e-6 == pytest.approx(10 * (inside - 10e-6))
    assert step_time.collective_seconds(row("all_gather"), 2, MeshDim(1, 1), MACHINE) == 0
    # Of a message only one end takes the time, and only the neighbour counts.
    assert step_time.collective_seconds(row("recv"), 2, MESH["pp"], MACHINE) == 0
    near = step_time.collective_seconds(row("send"), 2, MeshDim(64, 1), MACHINE)
    assert near == pytest.approx(10e-6 + 2e6 / 100e9)


def test_exposed_and_hidden():
    tensor, data = row("all_reduce"), row("all_gather", "parameter", "fsdp", elements=100 * MILLION)
    exposed = step_time.collective_seconds(tensor, 2, MESH["tp"], MACHINE)
    beside = step_time.collective_seconds(data, 2, MESH["fsdp"], MACHINE)
    sent = step_time.communication_seconds([tensor, data], HALF, MESH, MACHINE)
    assert sent == {"forward": exposed, "backward": 0, "optimizer": 0, "overlapped": beside}
    assert step_time.exposed_and_hidden(sent, 1.0) == pytest.approx((exposed, beside))
    short = step_time.exposed_and_hidden(sent, beside / 2)
    assert short == pytest.approx((exposed + beside / 2, beside / 2))
    # What is hidden takes no time; a pipeline's bubble does.
    assert step_time.StepTime(1.0, 0.5, 7.0, 0.25).total == 1.75
    # At the end of a step nothing is left to hide behind.
    last = step_time.communication_seconds([replace(data, pass_="optimizer")], HALF, MESH, MACHINE)
    assert step_time.exposed_and_hidden(last, 1.0)[1] == 0


def test_products_and_attention():
    """Both times of a product add up, or the longer counts; heads have their own speed."""
    computing, moving = product_work(1, 1000, 1000, 50000, 2), product_work(1, 1000, 1000, 1, 2)
    machine = replace(MACHINE, memory_gbytes_per_s=2.0, kernel_us=1000.0)
    added, longer = (
        [
            product_seconds(work, replace(machine, products_overlap=on))
            for work in (computing, moving)
        ]
        for on in (False, True)
    )
    launch, flops, sizes = 1e-3, (2e-3, 4e-8), (0.101, 1.002e-3)
    assert added == pytest.approx([f + b + launch for f, b in zip(flops, sizes, strict=True)])
    assert longer == pytest.approx([max(f, b) + launch for f, b in zip(flops, sizes, strict=True)])
    both = computing.plus(moving, 3)
    assert both.launches == 4
    assert product_seconds(both, machine) == pytest.approx(added[0] + 3 * added[1])
    shares = {"attention_share": 0.5, "narrow_attention_share": 0.25, "long_attention_share": 0.8}
    for heads, share in {(64, 1024): 0.25, (128, 1024): 0.5, (128, 32768): 0.8}.items():
        work = Work(attention={heads: 50e12})
        assert product_seconds(work, replace(MACHINE, **shares)) == pytest.approx(1 / share)
        assert product_seconds(work, replace(MACHINE, attention_share=0.5)) == pytest.approx(2)


RANKS, MICROBATCHES = 4, 8


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_a_schedule_of_one_stage_a_rank(name):
    """The order is torch's, and equal stages have a known bubble."""
    orders = pipeline_order(name, RANKS, 1, MICROBATCHES)
    seconds = makespan(orders, [(1.0, 2.0)] * RANKS)
    assert seconds - 3 * MICROBATCHES == 3 * (RANKS - 1)
    kind = getattr(schedules, f"Schedule{name}")
    empty = object.__new__(kind)
    empty.__dict__.update(_num_stages=RANKS, _n_microbatches=MICROBATCHES)
    theirs = empty._get_pipeline_order()
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for rank, ours in enumerate(orders):
        names = [action.computation_type.name for action in theirs[rank] if action is not None]
        kinds = [letters[name] for name in names if name in letters]
        assert [action.kind for action in ours] == kinds and len(kinds) == 2 * MICROBATCHES


def test_several_stages_a_rank_end():
    for name in ("Interleaved1F1B", "ZBVZeroBubble"):
        orders = pipeline_order(name, RANKS, 2, MICROBATCHES)
        idle = makespan(orders, [(1.0, 2.0)] * 2 * RANKS) - 2 * 3 * MICROBATCHES
        assert 0 < idle < 2 * 3 * (RANKS - 1)
    with pytest.raises(ValueError, match="a deadlock"):
        makespan(orders[1:], [(1.0, 2.0)] * 2 * RANKS)


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


REPORTS = {
    card: json.loads((modelled.ROOT / f"docs/data/{card}.json").read_text())["parts"]
    for card in ("h100", "h200")
}
PARTS = [
    f"{card} {part}"
    for card, parts in REPORTS.items()
    for part in parts
    if part not in modelled.NOT_MODELLED
]
OFTEN = ["h100 start", "h100 optimizer", "h200 graphs", "h200 spectral"]


@pytest.mark.parametrize("part", [*OFTEN, *nightly(*(part for part in PARTS if part not in OFTEN))])
def test_rows_of_a_part(part):
    card, _, name = part.partition(" ")
    rows = list(modelled.table_of(card, name, REPORTS[card][name]))
    assert rows
    for row in rows:
        far = abs(row.ratio - 1) > modelled.BOUND
        assert far == ((row.part, row.name) in modelled.REASONS), (row, row.ratio)


def test_every_part_is_modelled_or_has_a_reason():
    assert set(modelled.NOT_MODELLED) < {part for parts in REPORTS.values() for part in parts}
    assert {part for part, _ in modelled.REASONS} < set(PARTS)
