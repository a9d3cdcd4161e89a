# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CAAT-Net: the plan equals the lanes model of one process, and that, at p = 1, llama_full."""

from typing import Any

import pytest

from tests.distributed.ledger_cases import disagreements, expected, measure
from tests.distributed.tp_cases import five_steps, parities, worst, wrapped_parity
from tests.support.nightly import nightly
from tests.support.parity_cases import (
    BATCH,
    TOKENS,
    Case,
    build_model,
    model_args,
    relative,
    run_model,
    shard_model,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.plan_parts import TPSettings

CAAT, WIDE = TPSettings("caat"), TPSettings("caat", wide_sums=True)
GATHERED = TPSettings("caat", loss_parallel=False)
HALF = Case("full", CAAT, lanes=4, fraction=0.5)

CASES = [
    HALF,
    Case("full", WIDE, lanes=4, fraction=0.3, gqa=False),
    Case("full", WIDE, lanes=4, fraction=0.5, degree=2),
    Case("full", CAAT, lanes=8, fraction=0.25, gqa=False),
    Case("full", GATHERED, lanes=8, fraction=0.75, degree=2, gqa=False),
    Case("full", CAAT, lanes=2, fraction=0.5, degree=2),
    Case("full", CAAT, lanes=4, fraction=0.0),
    Case("full", CAAT, lanes=4, fraction=1.0, degree=2),
]


@pytest.fixture(scope="module")
def errors(four_ranks: RankPool) -> dict[Case, list[dict[str, float]]]:
    ranks = four_ranks.run(parities, CASES)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_the_lanes_of_one_process(case: Case, errors: dict[Case, Any]) -> None:
    assert worst(errors[case]) <= 1e-12


def whole_parity(case: Case, reference: Case) -> dict[str, float]:
    """Loss, logits and gradients of a case on ranks against another model of one process."""
    result, expected = (
        run_model(build_model(case, shard_model(case))),
        run_model(build_model(reference)),
    )
    pairs = {n: (result.gradients[n], g) for n, g in expected.gradients.items()}
    pairs |= {n: (getattr(result, n), getattr(expected, n)) for n in ("loss", "logits")}
    return {name: relative(*pair) for name, pair in pairs.items()}


@pytest.mark.parametrize("settings", [CAAT, WIDE], ids=["sums", "wide"])
@pytest.mark.parametrize("degree", [2, 4])
def test_sharing_everything_is_the_full_rank_model(
    degree: int, settings: TPSettings, four_ranks: RankPool
) -> None:
    case = Case("full", settings, lanes=4, degree=degree)
    assert worst(four_ranks.run(whole_parity, case, Case("full"))) <= 1e-12


@pytest.mark.parametrize(
    ("case", "wrappers"),
    [
        *nightly((Case("full", WIDE, lanes=2, fraction=0.5, degree=2), ["compile_last_block"])),
        (
            Case("full", WIDE, lanes=4, fraction=0.5, degree=2),
            ["compile_last_block", "fully_shard_blocks"],
        ),
    ],
    ids=["compiled", "two-lanes-compiled-fsdp"],
)
def test_wrapped_parity(case: Case, wrappers: list[str], four_ranks: RankPool) -> None:
    assert worst(four_ranks.run(wrapped_parity, case, wrappers, "eager")) <= 1e-12


def test_five_steps(four_ranks: RankPool) -> None:
    for norms, errors in four_ranks.run(five_steps, HALF):
        assert max(norms) <= 1e-12
        assert max(errors.values()) <= 1e-11


LEDGER = [case for case in CASES if case.degree == 4]
FULL = Case("full", TPSettings("megatron"))


def measure_all(cases: list[Case]) -> list[list[dict[str, Any]]]:
    return [measure(case) for case in cases]


@pytest.fixture(scope="module")
def ledgers(four_ranks: RankPool) -> dict[Case, list[list[dict[str, Any]]]]:
    """What each of the four ranks counted."""
    cases = [*LEDGER, FULL]
    return dict(zip(cases, zip(*four_ranks.run(measure_all, cases), strict=True), strict=True))


@pytest.mark.parametrize("case", LEDGER, ids=str)
def test_ledger_equals_formula(case: Case, ledgers: dict[Case, Any]) -> None:
    first, *others = ledgers[case]
    assert disagreements(first, expected(case), case) == []
    assert others == [first] * 3


def test_a_block_sends_p_times_what_the_full_plan_sends(ledgers: dict[Case, Any]) -> None:
    sent = {
        case: [
            sum(
                row["elements"]
                for row in ledgers[case][0]
                if row["scope"] == "block 1" and row["pass"] == pass_
            )
            for pass_ in ("forward", "backward")
        ]
        for case in (FULL, HALF)
    }
    d = model_args(FULL).dim
    payload = 2 * BATCH * TOKENS * d
    assert sent[FULL] == [payload, payload]
    assert sent[HALF] == [payload / 2, payload / 2 + 2 * d]  # and the norms' weights
