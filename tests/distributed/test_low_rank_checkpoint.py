# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank checkpointing under tensor parallelism: exact, and silent under BTP."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.ledger_cases import build, measure, run
from tests.support.nightly import nightly
from tests.support.parity_cases import Case, covering
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.plan_parts import TPSettings

BTP = [
    TPSettings("btp", grouping, norm, comm)
    for grouping in (True, False)
    for norm in ("online", "sync")
    for comm in ("all_reduce", "sequence")
]
BTP_CASES = [
    *covering([Case("cola", settings, degree=2) for settings in BTP]),
    Case("svd", TPSettings("btp"), degree=2),
    Case("lax", TPSettings("btp"), degree=2, gate="scalar"),
    Case("lax", TPSettings("btp", comm="sequence"), degree=2, gate="scalar"),
]
VANILLA = [Case("cola", TPSettings(plan), degree=2) for plan in ("vanilla", "vanilla_replicated")]


def gradients(case: Case, *changes: str) -> dict[str, torch.Tensor]:
    """This rank's parts of all gradients; with checkpointing, those of a pass that follows one."""
    model = build(case, *changes)
    run(model)
    if changes:
        model.zero_grad()
        run(model)
    parts = {}
    for name, parameter in model.named_parameters():
        clean = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        gradient = parameter.grad
        parts[clean] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return parts


FORMS = ("low_rank", "low_rank_attention")


def differences(cases: list[Case], forms: Sequence[str], *options: str) -> list[float]:
    """The largest relative difference to a run that keeps everything, for each case and form."""
    found = []
    for case in cases:
        plain = gradients(case, *[option for option in options if option != "compile_last"])
        for form in forms:
            checkpointed = gradients(case, form, *options)
            assert checkpointed.keys() == plain.keys()
            pairs = [(checkpointed[name], part) for name, part in plain.items()]
            found.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return found


def test_gradients_are_the_same(two_ranks: RankPool) -> None:
    cases = [*BTP_CASES, *VANILLA]
    for rank in two_ranks.run(differences, cases, FORMS):
        assert rank == [0.0] * (2 * len(cases))


@pytest.mark.parametrize(
    ("forms", "options"),
    [(FORMS, ["fsdp"]), *nightly((["low_rank_attention"], ["compile_last", "fsdp"]))],
    ids=["eager", "compiled"],
)
def test_gradients_are_the_same_compiled_and_sharded(
    forms: Sequence[str], options: list[str], four_ranks: RankPool
) -> None:
    case = Case("cola", TPSettings("btp"), degree=2)
    for rank in four_ranks.run(differences, [case], forms, *options):
        assert max(rank) < 1e-12


def measure_pairs(cases: list[Case]) -> list[Any]:
    return [
        [measure(case, *changes) for changes in ((), ("low_rank",), ("low_rank_attention",))]
        for case in cases
    ]


def test_btp_communicates_nothing_more(two_ranks: RankPool) -> None:
    for without, *checkpointed in two_ranks.run(measure_pairs, BTP_CASES)[0]:
        assert without
        assert all(rows == without for rows in checkpointed)


@pytest.mark.parametrize(
    ("comm", "change"),
    nightly(("all_reduce", "low_rank"), ("sequence", "low_rank_attention")),
)
def test_btp_communicates_nothing_more_compiled(
    comm: str, change: str, two_ranks: RankPool
) -> None:
    # In fp64 torch 2.11's inductor confuses the dtype of the CPU's attention.
    case = Case("cola", TPSettings("btp", comm=comm), degree=2, dtype=torch.float32)
    without = two_ranks.run(measure, case, "compile_last")[0]
    assert two_ranks.run(measure, case, change, "compile_last")[0] == without


def test_vanilla_repeats_its_collectives(two_ranks: RankPool) -> None:
    """The negative control: there the tensors behind the collectives are d- or f-wide."""
    for case in VANILLA:
        rows = two_ranks.run(measure, case, "low_rank", "split")[0]
        repeated = [row for row in rows if row["recompute"]]
        # All but the last of the block, whose result is the next block's input.
        calls = 7 if case.settings.plan == "vanilla" else 6
        assert [sum(r["calls"] for r in repeated if r["scope"] == "block 1")] == [calls]
        assert {row["pass"] for row in repeated} == {"backward"}
        without = two_ranks.run(measure, case)[0]
        assert [r for r in rows if not r["recompute"]] == [
            r | {"recompute": False} for r in without
        ]
