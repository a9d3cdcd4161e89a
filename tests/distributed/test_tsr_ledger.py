# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What TSR-Adam sends is what the formulas say, and never a compressed matrix's full gradient."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed import tsr_cases
from tests.distributed.tsr_cases import BASE, DEFAULTS, Case, build_model, place, take_step
from tests.distributed.tsr_ledger_cases import MESHES, STEPS, expected, measure
from tests.support.rank_pool import RankPool
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.optim.tsr.selection import TSRSettings

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
    "dense": replace(BASE, rank=4, refresh="dense", moments="reset"),
    "stagger": replace(BASE, rank=4, refresh="auto", stagger=True, refresh_interval=4),
    "random": replace(
        BASE,
        **{"rank": 4, "stagger": True, "start": "random", "refresh_interval": 3},
        **{"compress_head": True, "vocabulary_power_iterations": 0},
    ),
    "buckets": replace(BASE, rank=4, refresh="sketch", overlap_buckets=3),
    "bf16": replace(BASE, rank=4, refresh="sketch", core_dtype="bfloat16"),
    "one_sided": replace(BASE, rank=4, refresh="sketch", projection="one_sided"),
}

# Every setting meets replicas and shards at once; other meshes meet each kind of refresh.
PAIRS = [("hsdp2x2", name) for name in SETTINGS]
PAIRS += [
    (mesh, name)
    for mesh in ("fsdp2xtp2", "tp2xdp2")
    for name in ("auto", "sketch", "stagger", "one_sided")
]


def measure_all(pairs: list[tuple[str, str]]) -> list[Any]:
    return [measure(layout, SETTINGS[name], SHAPES) for layout, name in pairs]


@pytest.fixture(scope="module")
def measured(four_ranks: RankPool) -> dict[tuple[str, str], list[Any]]:
    ranks = four_ranks.run(measure_all, PAIRS)
    return {pair: [rank[index] for rank in ranks] for index, pair in enumerate(PAIRS)}


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_ledger_equals_formula(layout: str, name: str, measured: dict[Any, Any]) -> None:
    ranks = measured[layout, name]
    assert ranks[0] == expected(SETTINGS[name], MESHES[layout], SHAPES)
    assert all(rank == ranks[0] for rank in ranks)


def test_another_formula_is_noticed(measured: dict[Any, Any]) -> None:
    found = measured["hsdp2x2", "sketch"][0]
    for change in ({"rank": 5}, {"power_iterations": 1}, {"moments": "rotate"}):
        other = replace(SETTINGS["sketch"], **change)  # type: ignore[arg-type]
        assert found != expected(other, MESHES["hsdp2x2"], SHAPES)


def largest_payload(layout_name: str, settings: TSRSettings) -> list[list[int]]:
    """Elements of every single collective over the replicas, by step."""
    from torchtitan_lr.ledger import ledger as module

    sizes: list[list[int]] = [[]]
    original = module.identify

    def recording(*args: Any) -> Any:
        call = original(*args)
        if call is not None and call.dtype != torch.int64:
            sizes[-1].append(call.elements)
        return call

    with patch.object(tsr_cases, "SHAPES", SHAPES), patch.object(module, "identify", recording):
        case = Case(layout_name, settings, dtype=torch.float32)
        layout = place(layout_name)
        model = build_model(layout, case.dtype)
        optimizer = TSROptimizers([model], settings, DEFAULTS, replicas=layout.replicas)
        for step in range(STEPS):
            with CommLedger([], {}):
                take_step(model, optimizer, layout, case, step)
            sizes.append([])
    return sizes[:-1]


ONE = ("layers.0.feed_forward.w1.weight",)
"""The only compressed matrix, all others being taken out of the gradients' exchange."""


@pytest.mark.parametrize("refresh", ["sketch", "dense"])
def test_no_full_gradient_crosses_the_replicas(refresh: str, four_ranks: RankPool) -> None:
    settings = replace(BASE, rank=4, refresh=refresh, include=ONE, oversampling=1)  # type: ignore[arg-type]
    sizes = four_ranks.run(largest_payload, "replicate4", settings)[0]
    whole, others = 80 * 48, sum(torch.Size(s).numel() for n, s in SHAPES.items() if n not in ONE)
    for step, calls in enumerate(sizes):
        refreshes = step % settings.refresh_interval == 0
        carries_gradient = [n for n in calls if n != others and n >= whole]
        # The control: a dense refresh does send it, along with the dense gradients.
        assert bool(carries_gradient) == (refreshes and refresh == "dense")
        assert (others in calls) == (not carries_gradient)
        if not refreshes:
            assert sorted(calls) == [4 * 4, others]
