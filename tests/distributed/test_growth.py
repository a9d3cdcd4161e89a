# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Growth of a step: what four ranks measure, against the estimator's line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lr.estimate.step_time import Hardware
from torchtitan_lr.tools.growth import (
    Links,
    Point,
    draw,
    estimate_point,
    measure,
    measure_links,
    table,
)
from torchtitan_lr.tools.rank_pool import RankPool

SMALL = Point("length", width=128, layers=2, length=32, ranks=4, batch=2)
POINTS = [SMALL, replace(SMALL, length=64), replace(SMALL, layers=3)]
MACHINE = Hardware(
    name="a machine",
    peak_tflops=0.1,
    matmul_efficiency=0.9,
    memory_gib=1,
    devices_per_node=8,
    intra_node_gbytes_per_s=1,
    inter_node_gbytes_per_s=1,
    latency_us=1,
    memory_gbytes_per_s=10,
    kernel_us=1,
    attention_share=0.5,
)


@pytest.fixture(scope="module")
def report(four_ranks: RankPool) -> list[dict[str, Any]]:
    found = measure({4: four_ranks}, POINTS, rounds=2)
    links = measure_links(four_ranks, repeats=2)
    assert links.call > 0 and links.byte >= 0
    return [
        {"size": point.size, "measured": m, "estimated": estimate_point(point, MACHINE, links)}
        for point, m in zip(POINTS, found, strict=True)
    ]


def test_bytes_are_the_estimators_and_memory_nearly(report: list[dict[str, Any]]) -> None:
    for row in report:
        measured, estimated = row["measured"], row["estimated"]
        assert measured["bytes"] == estimated["bytes"] > 0
        assert measured["memory"] == pytest.approx(estimated["memory"], rel=0.02)
        assert len(measured["seconds"]) == 2 and min(measured["seconds"]) > 0
        assert estimated["seconds"] > 0
    # The controls: a longer sequence or another block are other points.
    first, longer, deeper = (row["measured"] for row in report)
    assert longer["bytes"] == 2 * first["bytes"]
    for other in (longer, deeper):
        assert other["memory"] > 1.05 * first["memory"] and other["bytes"] > first["bytes"]


def test_collectives_take_time() -> None:
    """A byte costs its time, and so does each of another block's calls."""
    none, calls = (estimate_point(SMALL, MACHINE, each) for each in (Links(), Links(call=1.0)))
    by_bytes = estimate_point(SMALL, MACHINE, Links(byte=1.0))
    assert by_bytes["seconds"] - none["seconds"] == pytest.approx(none["bytes"])
    deeper = replace(SMALL, layers=3)
    more = estimate_point(deeper, MACHINE, Links(call=1.0))["seconds"] - calls["seconds"]
    less = estimate_point(deeper, MACHINE, Links())["seconds"] - none["seconds"]
    assert more - less == pytest.approx(round(more - less)) and more - less > 4


def test_table_and_picture(report: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = {"length": json.loads(json.dumps(report))}
    lines: list[list[str]] = []
    table(rows, lines.append)
    assert [line[0] for line in lines] == ["length 32", "length 64", "length 32"]
    assert all(line[-1] == "1.00" and len(line) == 10 for line in lines)
    draw(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 5000
