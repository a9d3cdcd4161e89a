# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model of a step's time, by hand."""

from dataclasses import replace

import pytest

from torchtitan_lr.costs.hardware import Hardware, MeshDim
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.step_time import (
    collective_seconds,
    compute_seconds,
    exposed_seconds,
    model_step_time,
)

MACHINE = Hardware("test", 100.0, 0.5, 80.0, 8, 100.0, 10.0, 10.0)
MESH = {"tp": MeshDim(8, 1), "fsdp": MeshDim(4, 8), "pp": MeshDim(2, 32)}
MILLION = 10**6


def row(op, role="activation", dim="tp", pass_="forward", calls=1, elements=MILLION):
    return Traffic("block 0", pass_, op, role, calls, elements, dim)


@pytest.mark.parametrize(
    ("op", "share"),
    [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("send", 1.0)],
)
def test_collective(op, share):
    seconds = collective_seconds(row(op, calls=3), 2, MESH["tp"], MACHINE)
    assert seconds == pytest.approx(3 * 10e-6 + share * 2e6 / 100e9)


def test_links():
    inside = collective_seconds(row("all_gather"), 2, MeshDim(4, 1), MACHINE)
    between = collective_seconds(row("all_gather"), 2, MeshDim(4, 8), MACHINE)
    assert between - 10e-6 == pytest.approx(10 * (inside - 10e-6))
    assert collective_seconds(row("all_gather"), 2, MeshDim(1, 1), MACHINE) == 0
    # Of a message only one end takes the time, and only the neighbour counts.
    assert collective_seconds(row("recv"), 2, MESH["pp"], MACHINE) == 0
    near = collective_seconds(row("send"), 2, MeshDim(64, 1), MACHINE)
    assert near == pytest.approx(10e-6 + 2e6 / 100e9)


def test_exposed_and_hidden():
    tensor = row("all_reduce")
    data = row("all_gather", "parameter", "fsdp", elements=100 * MILLION)
    exposed = collective_seconds(tensor, 2, MESH["tp"], MACHINE)
    beside = collective_seconds(data, 2, MESH["fsdp"], MACHINE)
    long = model_step_time(1.0, [tensor, data], lambda _: 2, MESH, MACHINE)
    assert long.exposed_communication == pytest.approx(exposed)
    assert long.hidden_communication == pytest.approx(beside)
    assert long.total == pytest.approx(1.0 + exposed)
    short = model_step_time(beside / 2, [tensor, data], lambda _: 2, MESH, MACHINE)
    assert short.hidden_communication == pytest.approx(beside / 2)
    assert short.exposed_communication == pytest.approx(exposed + beside / 2)
    # At the end of a step nothing is left to hide behind.
    last = replace(data, pass_="optimizer")
    assert model_step_time(1.0, [last], lambda _: 2, MESH, MACHINE).hidden_communication == 0


def test_by_pass_and_bubble():
    rows = [row("all_reduce"), row("all_reduce", pass_="backward"), row("send", "gradient")]
    seconds = exposed_seconds(rows, lambda _: 2, MESH, MACHINE)
    assert seconds["forward"] == seconds["backward"] > 0
    time = model_step_time(1.0, [], lambda _: 2, MESH, MACHINE)
    assert replace(time, bubble=0.5).total == 1.5
    assert compute_seconds(50e12, MACHINE) == 1.0
