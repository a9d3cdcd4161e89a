# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Both vanilla plans equal one process; `test_parity_matrix.py` the whole matrix."""

import pytest
import torch

from tests.distributed.tp_cases import worst, wrapped_parity
from tests.support.parity_cases import TOLERANCE, Case, all_cases, covering, parity
from tests.support.rank_pool import RankPool
from torchtitan_lr.parallel.plan_parts import TPSettings

MATRIX = [
    case
    for case in all_cases()
    if case.settings.plan.startswith("vanilla") and case.dtype == torch.float64
]


@pytest.mark.parametrize("case", covering(MATRIX), ids=str)
def test_parity(case: Case, four_ranks: RankPool) -> None:
    assert worst(four_ranks.run(parity, case)) <= TOLERANCE[case.dtype]


def test_compiled_parity(two_ranks: RankPool) -> None:
    case = Case("cola", TPSettings("vanilla"), degree=2)
    errors = two_ranks.run(wrapped_parity, case, ["compile_last_block"], "eager")
    assert worst(errors) <= TOLERANCE[case.dtype]
