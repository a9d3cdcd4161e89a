# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest
import torch

from tests.unit.tiny import MARGIN, build_tiny, fp32_noise, max_error, tiny_args, tokens
from torchtitan_lr.hf.export import build_hf_config
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter, merge_factors
from torchtitan_lr.titan.specs import RoPEScalingArgs

# The original context is short, so that all three regimes of the scaling occur in 6 pairs.
SCALING = RoPEScalingArgs(original_max_position_embeddings=64)
SHAPES = {
    "mha": {},
    "gqa": {"n_kv_heads": 2},
    "llama3": {"n_kv_heads": 2, "rope_theta": 500.0, "rope_scaling": SCALING},
}


def build_hf(args, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**build_hf_config(args, torch.float32))).eval()


def hf_logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_full_gives_hugging_faces_logits(shape):
    args = tiny_args("full", **SHAPES[shape])
    theirs, ours = build_hf(args), LlamaModel(args)
    weights = LlamaStateDictAdapter(args, None).from_hf(theirs.state_dict())
    ours.load_state_dict(weights, strict=True)
    ids = tokens(args, s=32)
    assert max_error(ours(ids), hf_logits(theirs, ids)) < MARGIN * fp32_noise(ours, ids)


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_merges_into_a_llama(shape):
    ours = build_tiny("svd", **SHAPES[shape])
    theirs = build_hf(ours.model_args)
    merged = LlamaStateDictAdapter(ours.model_args, None).to_hf(ours.state_dict())
    theirs.load_state_dict(merged, strict=True)
    ids = tokens(ours.model_args, s=32)
    assert max_error(ours(ids), hf_logits(theirs, ids)) < MARGIN * fp32_noise(ours, ids)


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
