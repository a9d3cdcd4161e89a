# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Plans and a family from outside, known on the ranks alone, train and send what they say."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.test_layout import on_paper
from tests.distributed.training import train
from tests.support import parity_runs
from tests.support.parity_runs import EXACT, degrees, largest_difference, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.costs.step_traffic import compare, differences, step_traffic

CASES = {
    "gathered": ("lax", ["--low_rank.lax_gate=scalar"], []),
    "btp": ("tanh", [], ["--parallelism.tp_comm=sequence"]),
}
"""By plan: a family, what one process has too, and options of the plan."""

LAYOUT = degrees(tensor=2, local_batch=4)
"""FSDP shards what the plan leaves of a parameter."""


def with_toys(function: Callable[..., Any], *args: Any) -> Any:
    for name in ("toy_family", "toy_plan"):
        importlib.import_module(f"tests.{name}")
    parity_runs.add_parity_flavors()
    return function(*args)


def trained_and_counted(arguments: list[str]) -> dict[str, Any]:
    """Train; add what the last step sent otherwise than the formulas say."""
    run = train([*arguments, "--metrics.comm_ledger"])
    paper, dtypes = on_paper(arguments, 4)
    assert any(row["mesh_dim"] == "tp" for row in run["ledger"])
    wrong = differences(compare(run["ledger"], step_traffic(paper, 0), dtypes))
    return run | {"wrong": wrong}


@pytest.mark.parametrize("plan", CASES)
def test_they_train_as_one_process(plan: str, one_rank: RankPool, four_ranks: RankPool) -> None:
    family, common, options = CASES[plan]
    arguments = [*model(family), *common]
    alone = one_rank.run(with_toys, train, [*arguments, *degrees()])[0]
    arguments += [*LAYOUT, *options, f"--parallelism.tp_plan={plan}"]
    run = four_ranks.run(with_toys, trained_and_counted, arguments)[0]
    assert largest_difference(run, alone) < EXACT
    assert run["wrong"] == []
