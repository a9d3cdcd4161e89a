# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Megatron's two forms of the full-rank model equal one process."""

import pytest
import torch

from tests.distributed.tp_cases import worst, wrapped_parity
from tests.support.parity_cases import TOLERANCE, Case, all_cases, parity
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.plan_parts import TPSettings

MATRIX = [
    case for case in all_cases() if case.settings.plan == "megatron" and case.dtype == torch.float64
]
SEQUENCE = Case("full", TPSettings("megatron", comm="sequence"))


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_parity(case: Case, four_ranks: RankPool) -> None:
    assert worst(four_ranks.run(parity, case)) <= TOLERANCE[case.dtype]


@pytest.mark.nightly  # what is compiled of it is the vanilla plans' too
def test_compiled_parity(four_ranks: RankPool) -> None:
    errors = four_ranks.run(wrapped_parity, SEQUENCE, ["compile_blocks"], "eager")
    assert worst(errors) <= TOLERANCE[SEQUENCE.dtype]
