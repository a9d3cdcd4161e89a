# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The statistic of the norms against fp64; the norms on ranks are in tests/distributed."""

import pytest
import torch

from tests.reference import rms_norm
from torchtitan_lr.models.norms import (
    sum_of_squares,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_statistic_is_that_of_fp64(dtype: torch.dtype) -> None:
    x = torch.randn(8, 16, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] *= 2.0**40  # 2⁸⁰ is beyond half precision of the other kind
    exact = x.double().square().sum(-1)
    found = sum_of_squares(x)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    error = ((found.double() - exact).abs() / exact).max().item()
    assert error <= (1e-13 if dtype == torch.float64 else rms_norm.statistic_error(512))
    # The control: one rounding to bf16 costs a hundred times as much.
    rounded = found.bfloat16().double()
    assert ((rounded - exact).abs() / exact).max() > 50 * rms_norm.statistic_error(512)
