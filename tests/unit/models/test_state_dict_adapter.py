# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import torch

from tests.unit.tiny import build_tiny
from torchtitan_lr.models.state_dict_adapter import merge_factors


def test_merged_bf16_is_rounded_once():
    weights = build_tiny("svd").bfloat16().state_dict()
    name = "layers.0.attention.wq."
    merged = merge_factors(weights)[f"{name}weight"]
    exact = weights[f"{name}B.weight"].double() @ weights[f"{name}A.weight"].double()
    assert merged.dtype == torch.bfloat16
    # One rounding to bf16, of a sum of 12 products in fp32.
    sizes = weights[f"{name}B.weight"].double().abs() @ weights[f"{name}A.weight"].double().abs()
    assert ((merged.double() - exact).abs() <= 2**-8 * exact.abs() + 12 * 2**-23 * sizes).all()
