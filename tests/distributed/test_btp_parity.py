# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""BTP equals one process: part of the matrix; `test_parity_matrix.py` has it all."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.tp_cases import five_steps, parities, worst, wrapped_parity
from tests.support.nightly import nightly
from tests.support.parity_cases import (
    Case,
    Result,
    all_cases,
    alone,
    build_model,
    covering,
    relative,
    run_model,
    shard_model,
)
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.plan_parts import TPSettings

MATRIX = [
    case for case in all_cases() if case.settings.plan == "btp" and case.dtype == torch.float64
]
DOUBLE = torch.float64
SEQUENCE = TPSettings("btp", False, comm="sequence")


@pytest.fixture(scope="module")
def errors(four_ranks: RankPool) -> dict[Case, list[dict[str, float]]]:
    ranks = four_ranks.run(parities, covering(MATRIX))
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(covering(MATRIX))}


@pytest.mark.parametrize("case", covering(MATRIX), ids=str)
def test_parity(case: Case, errors: dict[Case, Any]) -> None:
    """In fp64; other precisions are below."""
    assert worst(errors[case]) <= 1e-12


@pytest.mark.parametrize(
    ("case", "wrappers", "backend"),
    [
        # In fp64 torch 2.11's inductor confuses the dtype of the CPU's attention.
        pytest.param(
            Case(degree=2, dtype=torch.float32),
            ["compile_last_block"],
            "inductor",
            marks=pytest.mark.nightly,
        ),
        *nightly((Case(degree=2), ["fully_shard_blocks"], "")),
        (
            Case("lax", SEQUENCE, degree=2, gate="scalar"),
            ["compile_last_block", "fully_shard_blocks"],
            "eager",
        ),
    ],
    ids=["inductor", "fsdp", "sequence-compiled-fsdp"],
)
def test_wrapped_parity(
    case: Case, wrappers: list[str], backend: str, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    ranks = four_ranks if "fully_shard_blocks" in wrappers else two_ranks
    limit = 1e-12
    if case.dtype != DOUBLE:  # ten times what rounding costs one process
        limit = 10 * max(ranks.run(rounding, case))
        assert 1e-7 < limit < 1e-4
    assert worst(ranks.run(wrapped_parity, case, wrappers, backend)) <= limit


def rounding(case: Case) -> float:
    """Largest relative error of one process in the case's dtype against fp64; on a rank."""
    rounded, exact = rounded_and_exact(case)
    pairs = [(rounded.gradients[name], gradient) for name, gradient in exact.gradients.items()]
    pairs += [(rounded.logits, exact.logits), (rounded.stream_gradient, exact.stream_gradient)]
    return max(relative(found.double(), expected) for found, expected in pairs)


def rounded_and_exact(case: Case) -> tuple[Result, Result]:
    """One process in the case's dtype, and in fp64 from the same weights."""
    rounded, exact = build_model(alone(case)), build_model(alone(replace(case, dtype=DOUBLE)))
    with torch.no_grad():
        for target, weight in zip(exact.parameters(), rounded.parameters(), strict=True):
            target.copy_(weight)
    return run_model(rounded), run_model(exact)


def deviation(result: Result, exact: Result) -> dict[str, float]:
    """Relative rms errors of logits and of all gradients together."""
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    pairs = [(result.gradients[name].double(), g) for name, g in exact.gradients.items()]
    square = sum((a - b).square().sum() for a, b in pairs)
    whole = sum(b.square().sum() for _, b in pairs)
    logits = result.logits.double() - exact.logits
    return {
        "logits": float(logits.norm() / exact.logits.norm()),
        "gradients": float((square / whole) ** 0.5),
    }


def rounding_errors(dtype: torch.dtype, settings: list[TPSettings]) -> list[dict[str, float]]:
    """Errors against fp64: of one process, and of each plan; on a rank."""
    case = Case(dtype=dtype)
    rounded, exact = rounded_and_exact(case)
    found = [deviation(rounded, exact)]
    for choice in settings:
        sharded = replace(case, settings=choice)
        found.append(deviation(run_model(build_model(case, shard_model(sharded))), exact))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, *nightly(torch.float32)], ids=str)
def test_rounding_is_that_of_one_process(dtype: torch.dtype, four_ranks: RankPool) -> None:
    """Rounding is measured on one process in the same run.

    Where that rounds a product once, four ranks round their terms (each half as large as the sum),
    three partial sums and the result: √(4·¼ + ½ + ¾ + 1) < 2 times as much, were there no other
    rounding in the model.
    """
    plans = [TPSettings(), SEQUENCE, TPSettings(norm="sync")]
    for errors in four_ranks.run(rounding_errors, dtype, plans):
        noise, *found = errors
        for name in ("logits", "gradients"):
            assert noise[name] > torch.finfo(dtype).eps / 16
            assert all(plan[name] <= 2 * noise[name] for plan in found)


@pytest.mark.parametrize(
    "case",
    [Case("lax", gate="scalar"), Case("cola", SEQUENCE, degree=2)],
    ids=str,
)
def test_five_steps(case: Case, four_ranks: RankPool) -> None:
    for norms, errors in four_ranks.run(five_steps, case):
        assert max(norms) <= 1e-12
        assert max(errors.values()) <= 1e-11
