# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A plan that is registered from outside the package trains, and sends what its formula says.

`tests.toy_plan` is imported on the ranks only: a registered plan stays for the process's life.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.ledger_cases import disagreements, expected, measure
from tests.distributed.tp_cases import Case, parities, worst
from tests.distributed.training import train
from tests.support.parity_runs import EXACT, largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.placement import TPSettings

TOY = TPSettings("gathered")
CASES = [
    Case("cola", TOY),
    Case("svd", TOY, gqa=False, degree=2),
    Case("lax", TOY, gate="scalar"),
    Case("cola", replace(TOY, loss_parallel=False)),
]
RUN = ["--training.steps=3"]
LAYOUT = [
    *("--parallelism.tp_plan=gathered", "--experimental.custom_import=tests.toy_plan"),
    *("--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=4"),
]


def with_toy(function: Callable[..., Any], *args: Any) -> Any:
    importlib.import_module("tests.toy_plan")
    return function(*args)


def ledger_against(case: Case, formula: str) -> list[Any]:
    wanted = replace(case, settings=replace(case.settings, plan=formula))
    return disagreements(measure(case), expected(wanted), case)


def test_parity(four_ranks: RankPool) -> None:
    for errors in zip(*four_ranks.run(with_toy, parities, CASES), strict=True):
        assert worst(list(errors)) <= 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ledger_equals_its_own_formula(case: Case, four_ranks: RankPool) -> None:
    assert four_ranks.run(with_toy, ledger_against, case, "gathered") == [[]] * 4


def test_it_trains_as_one_process(one_rank: RankPool, four_ranks: RankPool) -> None:
    """Two replicas of two ranks: FSDP shards what the plan left of a parameter."""
    model = ["--model.name=llama_lax", *RUN]
    (alone,) = one_rank.run(train, model)
    run = four_ranks.run(train, [*model, *LAYOUT])[0]
    assert largest_difference(run, alone) <= EXACT
