# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/bench_exchange.py``: what it times is a real exchange of the codec it names."""

from typing import Any

import pytest

from tests.support.rank_pool import RankPool
from torchtitan_lr.compression.peeling import smallest_theta
from torchtitan_lr.compression.sizes import LEVELS


def exchange(*arguments: str) -> dict[str, Any]:
    import torch

    from scripts.check import bench_exchange

    options = bench_exchange._parse(["--megabytes=0.5", "--repeats=1", *arguments])
    device = torch.device("cpu")
    return {name: bench_exchange._bench(name, options, device) for name in options.codecs}


@pytest.mark.parametrize("level", ["2x", "10x"])
def test_codecs_are_timed(level: str, four_ranks: RankPool) -> None:
    first, *others = four_ranks.run(exchange, f"--level={level}")
    assert all(other == first for other in others)  # the slowest rank's times
    assert first.keys() == {"dense", "sketch", "sparse"}
    for row in first.values():
        assert row["seconds"] > 0
        assert row["seconds_per_MB"] == pytest.approx(row["seconds"] / 0.5)
    c, theta = LEVELS[level]
    assert first["dense"]["bits"] == 32
    assert first["sketch"]["bits"] == pytest.approx(1 + 32 / c)
    assert first["sparse"]["bits"] == pytest.approx(1 + 32 * (1 - theta))
    # Raised where four ranks' sketch would not peel as published.
    assert first["sketch"]["theta"] == pytest.approx(max(theta, smallest_theta(c, 4)))
