# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/calibrate.py`` on ranks: the links are measured, not assumed."""

import torch

from scripts.bench.calibration import Bench, time_links
from tests.support.rank_pool import RankPool


def measured_links() -> tuple[float, float]:
    return time_links(Bench(torch.device("cpu"), torch.float32, repeats=5, megabytes=16.0))


def test_links_are_timed(four_ranks: RankPool) -> None:
    for latency, bandwidth in four_ranks.run(measured_links):
        assert 0 < latency < 1
        assert 1e6 < bandwidth < 1e12
