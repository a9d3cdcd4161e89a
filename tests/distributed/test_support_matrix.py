# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Combinations drawn from the table of what works with what train like one process.

A run of the suite trains a few that have every value; ``--full`` trains all.
"""

from functools import cache
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import (
    DEEP,
    EXACT,
    ROUNDING,
    ROUNDING_OF_POLAR_FACTORS,
    bf16_references,
    largest_difference,
    rounding_excess,
)
from tests.support.rank_pool import RankPool
from tests.support.support_matrix import Combination, SupportMatrix, world_size

MATRIX = SupportMatrix()
ONE = ["--training.steps=1", "--lr_scheduler.warmup_steps=0"]


def name(combination: Combination) -> str:
    return "-".join(value for value in combination.values() if value != "none")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        draws = MATRIX.every_draw if full else MATRIX.usual_draws
        metafunc.parametrize("combination", draws, ids=name)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Any:
    names = {2: "two_ranks", 4: "four_ranks", 8: "eight_ranks"}
    return lambda ranks: request.getfixturevalue(names[ranks])


def depth(combination: Combination) -> list[str]:
    """Return the argument for a model with layers for four stages where there are four."""
    return DEEP if combination["pipeline"] in ("Interleaved1F1B", "ZBVZeroBubble") else []


@pytest.fixture(scope="module")
def rounding(one_rank: RankPool) -> Any:
    @cache
    def run(*arguments: str) -> list[dict[str, Any]]:
        return bf16_references(one_rank, [*arguments, *ONE], train)

    return run


def test_a_combination_trains_like_one_process(
    combination: Combination, pool: Any, reference: Any, rounding: Any
) -> None:
    ranks: RankPool = pool(world_size(combination))
    deep = depth(combination)
    run = ranks.run(train, [*MATRIX.arguments(combination, "eager"), *deep, *ONE])[0]
    alone = [*MATRIX.reference(combination | {"precision": "none"}), *deep]
    if combination["precision"] != "none":
        spectral = combination["optimizer"] in ("muon", "spectron", "lora_muon")
        if spectral:
            excess = rounding_excess(run, rounding(*alone), floor=max)
            assert excess < ROUNDING_OF_POLAR_FACTORS
        else:
            assert rounding_excess(run, rounding(*alone)) < ROUNDING
    else:
        assert largest_difference(run, reference(*alone, *ONE)) < EXACT
