# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Growth of a step: what four ranks measure, against the estimator's line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.calibration import Bench
from scripts.bench.growth import (
    Links,
    Point,
    draw,
    estimate_point,
    measure,
    measure_links,
    measure_machine,
    messages,
    table,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.estimate.step_time import Hardware

SMALL = Point("length", width=128, layers=2, length=32, ranks=4, batch=2)
POINTS = [SMALL, replace(SMALL, length=64)]
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
    links = measure_links(four_ranks, 4, MACHINE, repeats=2)
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
    # The control: a longer sequence is another point.
    first, longer = (row["measured"] for row in report)
    assert longer["bytes"] == pytest.approx(2 * first["bytes"], rel=1e-4)  # but for one scalar
    assert longer["memory"] > 1.05 * first["memory"]


def test_ranks_that_run_at_once_are_calibrated(four_ranks: RankPool) -> None:
    bench = Bench(torch.device("cpu"), torch.float32, repeats=1, megabytes=0.1)
    machine = measure_machine(
        four_ranks, bench, [(256, 64, 64), (64, 256, 64), (128, 128, 128)], 16
    )
    assert 0 < machine.peak_tflops * machine.matmul_efficiency < 10
    assert 0 < machine.kernel_us < 1e4 and 0 < machine.memory_gbytes_per_s < 1e4


def test_a_call_costs_what_the_links_say() -> None:
    """The control: without them the estimate is that of kernels alone."""
    calls, sent = messages(SMALL)
    times = [
        estimate_point(SMALL, MACHINE, links)["seconds"] for links in (Links(), Links(1e-3, 1e-9))
    ]
    assert times[1] - times[0] == pytest.approx(1e-3 * calls + 1e-9 * sent)


def test_another_block_has_its_calls() -> None:
    (few, small), (more, large) = (messages(replace(SMALL, layers=n)) for n in (2, 3))
    assert more - few > 4 and large > small
    assert messages(replace(SMALL, ranks=1)) == (0, 0)


def test_table_and_picture(report: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = {"length": json.loads(json.dumps(report))}
    lines: list[list[str]] = []
    table(rows, lines.append)
    assert [line[0] for line in lines] == ["length 32", "length 64"]
    assert all(line[-1] == "1.00" and len(line) == 10 for line in lines)
    draw(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 5000
