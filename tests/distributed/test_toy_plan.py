# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plans and a family from outside the package train, and send what their formulas say.

The modules are imported on the ranks only: a registered plan stays for the process's life.
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
from torchtitan_lr.parallel.plan_parts import TPSettings

TOY, MIXED, DENSE = TPSettings("gathered"), TPSettings("mixed"), TPSettings("mixed_dense")
CASES = [
    Case("cola", TOY),
    Case("svd", TOY, gqa=False, degree=2),
    Case("lax", TOY, gate="scalar"),
    Case("cola", replace(TOY, loss_parallel=False)),
    Case("cola", MIXED, degree=2),
    Case("svd", replace(MIXED, grouping=False)),
    Case("lax", MIXED, degree=2, gate="scalar"),
    Case("full", DENSE, degree=2),
    *(Case("tanh", TPSettings(plan)) for plan in ("btp", "vanilla", "gathered")),
    Case("tanh", TPSettings("btp", comm="sequence")),
]
RUN = ["--training.steps=3"]
LAYOUT = ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=4"]


def with_toy(function: Callable[..., Any], *args: Any) -> Any:
    importlib.import_module("tests.toy_family")
    importlib.import_module("tests.toy_plan")
    importlib.import_module("tests.toy_mixed_plan")
    return function(*args)


def ledger_disagreements(case: Case) -> list[Any]:
    return disagreements(measure(case), expected(case), case)


def test_parity(four_ranks: RankPool) -> None:
    for errors in zip(*four_ranks.run(with_toy, parities, CASES), strict=True):
        assert worst(list(errors)) <= 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ledger_equals_its_own_formula(case: Case, four_ranks: RankPool) -> None:
    assert four_ranks.run(with_toy, ledger_disagreements, case) == [[]] * 4


def test_they_train_as_one_process(one_rank: RankPool, four_ranks: RankPool) -> None:
    """Two replicas of two ranks: FSDP shards what the plan left of a parameter."""
    model = ["--model.name=llama_lax", *RUN]
    (alone,) = one_rank.run(train, model)
    for plan, module in (("gathered", "toy_plan"), ("mixed", "toy_mixed_plan")):
        named = [f"--parallelism.tp_plan={plan}", f"--experimental.custom_import=tests.{module}"]
        run = four_ranks.run(with_toy, train, [*model, *LAYOUT, *named])[0]
        assert largest_difference(run, alone) <= EXACT, plan
