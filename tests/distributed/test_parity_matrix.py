# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every tensor-parallel case and every layout of every family, with ``--full`` alone."""

import pytest

from tests.distributed.training import train
from tests.support.parity_cases import TOLERANCE, Case, all_cases, parity
from tests.support.parity_runs import (
    DEEP,
    EXACT,
    LAYOUTS,
    largest_difference,
    model,
    schedule,
    trained_weights,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.models.families import FAMILIES

pytestmark = pytest.mark.nightly

PLANS = sorted({case.settings.plan for case in all_cases()})
SCHEDULES = {
    f"{layout}_{name}": (LAYOUTS[layout][0], [*LAYOUTS[layout][1], *schedule(name)])
    for layout in ("fsdp2_pp2", "pp2_tp2")
    for name in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
}


def worst_errors(cases: list[Case]) -> list[float]:
    """Return the largest error of each case on this rank."""
    return [max(parity(case).values()) for case in cases]


@pytest.mark.parametrize("plan", PLANS)
def test_every_case_of_a_plan(plan: str, four_ranks: RankPool) -> None:
    cases = [case for case in all_cases() if case.settings.plan == plan]
    for errors in four_ranks.run(worst_errors, cases):
        wrong = {str(c): e for c, e in zip(cases, errors, strict=True) if e > TOLERANCE[c.dtype]}
        assert not wrong and len(errors) == len(cases)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_a_family(
    family: str, request: pytest.FixtureRequest, one_rank: RankPool
) -> None:
    pools = {1: "one_rank", 2: "two_ranks", 4: "four_ranks", 8: "eight_ranks"}
    weights = trained_weights(one_rank, [*model(family), *DEEP, *LAYOUTS["dp1"][1]])
    start = [*DEEP, "--checkpoint.enable", f"--checkpoint.initial_load_path={weights}"]
    expected = one_rank.run(train, [*model(family), *LAYOUTS["dp1"][1], *start])[0]
    for ranks, options in (LAYOUTS | SCHEDULES).values():
        pool = request.getfixturevalue(pools[ranks])
        run = pool.run(train, [*model(family), *options, *start])[0]
        assert largest_difference(run, expected) < EXACT, options
