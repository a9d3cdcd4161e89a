# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BTP equals one process: a fixed part of the matrix; `scripts/parity_matrix.py` runs all of it."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed import tp_cases
from tests.distributed.pool import RankPool
from tests.distributed.tp_cases import (
    TOLERANCE,
    Case,
    build_model,
    model_args,
    parity,
    relative,
    run_model,
    shard_model,
    train_steps,
)
from tests.distributed.tp_matrix import all_cases, axes, covering, pairs
from torchtitan_lr.parallel.tensor_parallel import TPSettings

MATRIX = [case for case in all_cases() if case.settings.plan == "btp"]
SEQUENCE = TPSettings("btp", False, norm_stat="column", comm="sequence", head="scatter")


def wrapped_parity(case: Case, names: list[str], backend: str) -> dict[str, float]:
    tp_cases.BACKEND = backend
    return parity(case, *(getattr(tp_cases, name) for name in names))


def worst(results: list[dict[str, float]]) -> float:
    assert all(len(errors) > 10 for errors in results)
    return max(max(errors.values()) for errors in results)


def test_the_subset_covers_every_pair_of_values() -> None:
    subset = covering(MATRIX)
    assert set().union(*map(pairs, subset)) == set().union(*map(pairs, MATRIX))
    for axis, values in {
        "family": {"svd", "cola", "lax"},
        "norm": {"online", "sync"},
        "norm_stat": {"async", "column"},
        "comm": {"all_reduce", "sequence"},
        "head": {"plain", "scatter"},
        "grouping": {True, False},
        "gqa": {True, False},
        "degree": {2, 4},
        "loss_parallel": {True, False},
    }.items():
        assert {axes(case)[axis] for case in subset} == values


@pytest.mark.parametrize("case", covering(MATRIX), ids=str)
def test_parity(case: Case, four_ranks: RankPool) -> None:
    assert worst(four_ranks.run(parity, case)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("case", "wrappers", "backend"),
    [
        # In fp64 torch 2.11's inductor confuses the dtype of the CPU's attention.
        (Case(dtype=torch.float32), ["compile_blocks"], "inductor"),
        (Case(degree=2), ["fully_shard_blocks"], ""),
        (
            Case("lax", SEQUENCE, degree=2, gate="scalar"),
            ["compile_blocks", "fully_shard_blocks"],
            "aot_eager",
        ),
    ],
    ids=["inductor", "fsdp", "sequence-compiled-fsdp"],
)
def test_wrapped_parity(
    case: Case, wrappers: list[str], backend: str, four_ranks: RankPool
) -> None:
    assert worst(four_ranks.run(wrapped_parity, case, wrappers, backend)) <= TOLERANCE[case.dtype]


def bf16_error(case: Case) -> float:
    """Relative rms error of the logits in bf16 against fp64; on a rank."""
    exact = run_model(build_model(Case(case.family)))
    model = build_model(case, shard_model(case))
    result = run_model(model)
    assert all(g.isfinite().all() and g.dtype == torch.bfloat16 for g in result.gradients.values())
    difference = result.logits.double() - exact.logits
    return (difference.norm() / exact.logits.norm()).item()


@pytest.mark.parametrize("settings", [TPSettings(), SEQUENCE, TPSettings(norm="sync")], ids=str)
def test_bf16(settings: TPSettings, four_ranks: RankPool) -> None:
    errors = four_ranks.run(bf16_error, Case("cola", settings, dtype=torch.bfloat16))
    assert 1e-4 < max(errors) < 2e-2


@pytest.mark.parametrize(
    "case",
    [Case("lax", gate="scalar"), Case("cola", SEQUENCE, degree=2)],
    ids=str,
)
def test_five_steps(case: Case, four_ranks: RankPool) -> None:
    for norms, errors in four_ranks.run(five_steps, case):
        assert max(norms) <= 1e-12
        assert max(errors.values()) <= 1e-9  # AdamW divides by the root of tiny second moments


def five_steps(case: Case) -> tuple[list[float], dict[str, float]]:
    """Relative errors of gradient norms and of parameters after AdamW with clipping; on a rank."""
    norms, model = train_steps(build_model(case, shard_model(case)))
    expected_norms, expected = train_steps(build_model(case))
    moved = dict(build_model(case).named_parameters())
    errors = {}
    for (name, value), (_, exact) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert isinstance(value, DTensor)
        assert relative(exact.detach(), moved[name].detach()) > 1e-4  # training did something
        errors[name] = relative(value.full_tensor().detach(), exact.detach())
    return [abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)], errors


def initial_differences(case: Case) -> list[str]:
    """Names of the parameters whose shards do not assemble to one process's; on a rank."""
    whole = dict(build_model(case).named_parameters())
    model = build_model(case, shard_model(case))
    different = []
    for name, value in model.named_parameters():
        assert isinstance(value, DTensor)
        if not torch.equal(value.full_tensor(), whole[name]):
            different.append(name)
    sharded = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    assert sharded < 0.3 * sum(p.numel() for p in whole.values())
    return different


@pytest.mark.parametrize("plan", ["btp", "vanilla"])
def test_shards_assemble_to_the_same_weights(plan: Any, four_ranks: RankPool) -> None:
    case = Case("lax", TPSettings(plan), gate="scalar")
    assert model_args(case).lax_gate == "scalar"
    assert four_ranks.run(initial_differences, case) == [[]] * 4
