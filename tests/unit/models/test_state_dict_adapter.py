# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest
import torch

from tests.unit.tiny import build_tiny
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter, merge_factors


def test_merged_bf16_is_rounded_once():
    weights = build_tiny("svd").bfloat16().state_dict()
    name = "layers.0.attention.wq."
    merged = merge_factors(weights)[f"{name}weight"]
    exact = weights[f"{name}B.weight"].double() @ weights[f"{name}A.weight"].double()
    assert merged.dtype == torch.bfloat16
    # One rounding to bf16, of a sum of 12 products in fp32.
    sizes = weights[f"{name}B.weight"].double().abs() @ weights[f"{name}A.weight"].double().abs()
    assert ((merged.double() - exact).abs() <= 2**-8 * exact.abs() + 12 * 2**-23 * sizes).all()


@pytest.mark.parametrize(
    ("family", "changes"),
    [("cola", {}), ("lax", {"lax_gate": "scalar"}), ("svd", {"activation": "none"})],
)
def test_others_keep_their_tensors_by_llamas_names(family, changes):
    model = build_tiny(family, n_kv_heads=2, **changes)
    adapter = LlamaStateDictAdapter(model.model_args, None, coded=True)
    weights = model.state_dict()
    converted = adapter.to_hf(weights)
    name, ours = "model.layers.1.self_attn.v_proj.A.weight", "layers.1.attention.wv.A.weight"
    assert converted[name] is weights[ours] and len(converted) == len(weights)
    again = adapter.from_hf(converted)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
