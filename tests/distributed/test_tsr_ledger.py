# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What TSR-Adam sends is what the formulas say, and never a compressed matrix's full gradient."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.tsr_cases import BASE
from tests.distributed.tsr_ledger_cases import MESHES, expected, measure
from tests.support.nightly import nightly
from tests.support.rank_pool import RankPool
from torchtitan_lr.costs import tsr_messages

SHAPES: dict[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (64, 48),
    "layers.0.attention.wq.weight": (48, 48),
    "layers.0.attention.wk.weight": (24, 48),
    "layers.0.attention.wo.weight": (48, 48),
    "layers.0.feed_forward.w1.weight": (80, 48),
    "layers.0.feed_forward.w2.weight": (48, 80),
    "layers.0.ffn_norm.weight": (48,),
    "output.weight": (64, 48),
}
"""Every side divides by four, so that all ranks send the same."""

SETTINGS = {
    "auto": replace(BASE, rank=12, refresh="auto"),
    "sketch": replace(BASE, rank=4, refresh="sketch", moments="keep", power_iterations=2),
    "dense": replace(BASE, rank=4, refresh="dense"),
    "stagger": replace(BASE, rank=4, refresh="auto", stagger=True, refresh_interval=4),
    "random": replace(
        BASE,
        **{"rank": 4, "stagger": True, "start": "random", "refresh_interval": 3},
        compress_head=True,
    ),
    "buckets": replace(
        BASE, rank=4, refresh="sketch", overlap_buckets=3, stagger=True, refresh_interval=4
    ),
    "one_sided": replace(BASE, rank=4, refresh="sketch", projection="one_sided"),
}

# Every setting meets replicas and shards at once (`random` and `buckets` stagger too).
PAIRS = [("hsdp2x2", name) for name in SETTINGS if name != "stagger"]
PAIRS += [("fsdp2xtp2", "auto"), ("tp2xdp2", "one_sided")]
SELDOM = [("hsdp2x2", "stagger"), ("fsdp2xtp2", "stagger")]
SELDOM += [(mesh, "sketch") for mesh in ("fsdp2xtp2", "tp2xdp2")]
SELDOM += [("tp2xdp2", "auto"), ("tp2xdp2", "stagger"), ("fsdp2xtp2", "one_sided")]


@pytest.fixture(scope="module")
def measured(four_ranks: RankPool) -> Callable[[str, str], list[Any]]:
    """What each rank sent, by layout and name of the settings."""
    return cache(lambda layout, name: four_ranks.run(measure, layout, SETTINGS[name], SHAPES))


def test_only_sums_over_replicas_travel_in_bf16(four_ranks: RankPool) -> None:
    """Cores, dense gradients and sketches do; terms of a shard's sum and checksums do not."""
    layout, settings = "hsdp2x2", SETTINGS["auto"]
    for rank in four_ranks.run(measure, layout, settings, SHAPES, True):
        assert rank == expected(settings, MESHES[layout], SHAPES, half=True)


@pytest.mark.parametrize(("layout", "name"), [*PAIRS, *nightly(*SELDOM)])
def test_ledger_equals_formula(layout: str, name: str, measured: Any) -> None:
    ranks = measured(layout, name)
    assert ranks[0] == expected(SETTINGS[name], MESHES[layout], SHAPES)
    assert all(rank == ranks[0] for rank in ranks)


@pytest.mark.parametrize("bucket", [2600, 5000])
def test_small_buckets_hold_what_the_formula_says(bucket: int, four_ranks: RankPool) -> None:
    """Which matrices share a bucket depends on their order, which is that of the stacks."""
    layout, settings = "fsdp2xtp2", SETTINGS["auto"]
    with patch.object(tsr_messages, "BUCKET", bucket):
        steps = expected(settings, MESHES[layout], SHAPES)
    assert steps != expected(settings, MESHES[layout], SHAPES)
    for rank in four_ranks.run(measure, layout, settings, SHAPES, False, bucket):
        assert rank == steps
