# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The norms of a feature-sharded stream on one rank (T = 1), against fp64; ranks: distributed."""

from dataclasses import replace

import pytest
import torch

from tests.reference import rms_norm
from torchtitan_lr.parallel.tensor.collectives import Ranks
from torchtitan_lr.parallel.tensor.ends import scattered_norm
from torchtitan_lr.parallel.tensor.online_norm import (
    OnlineNorm,
    online_down,
    sum_of_squares,
    sync_norm,
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


@pytest.mark.parametrize("form", ["grouped", "ungrouped", "sync", "head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_is_the_exact_one_rounded_once(dtype: torch.dtype, form: str, alone: Ranks) -> None:
    x, gamma, weight = rms_norm.inputs(dtype)
    norm = OnlineNorm(alone, rms_norm.DIM, rms_norm.EPS)
    if form == "sync":
        normed = sync_norm(x, gamma, rms_norm.DIM, rms_norm.EPS, alone)
        found = torch.nn.functional.linear(normed, weight)
    elif form == "head":
        normed = scattered_norm(x, gamma, rms_norm.DIM, rms_norm.EPS, alone)
        found = torch.nn.functional.linear(normed, weight)
    else:
        norm = replace(norm, grouped=form == "grouped")
        found = torch.cat(online_down(x, gamma, weight.split([10, 6]), norm), -1)
    assert found.dtype == dtype
    exact = rms_norm.normalized(x, gamma, weight)
    assert rms_norm.half_units(found, exact) <= rms_norm.LIMIT[dtype]


def test_a_rounded_statistic_is_noticed(alone: Ranks) -> None:
    """The statistic as a column of a bf16 payload is one."""
    x, gamma, weight = rms_norm.inputs(torch.bfloat16)
    norm = OnlineNorm(alone, rms_norm.DIM, rms_norm.EPS, column=True)
    exact = rms_norm.normalized(x, gamma, weight)
    error = rms_norm.half_units(online_down(x, gamma, [weight], norm)[0], exact)
    # Half a unit of the statistic is half of that in its root: at most one more half unit, where
    # the result lies at the upper end of its binade.
    assert 1.2 < error <= 2.02
