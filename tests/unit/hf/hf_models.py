# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Models in fp64 that exports and imports carry."""

from types import MethodType

import torch
import torch.nn.functional as F

from tests.unit.tiny import tiny_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan.specs import RoPEScalingArgs

SCALING = RoPEScalingArgs(original_max_position_embeddings=64)
LANES = {"lanes": 4, "sync_fraction": 0.55, "vocab_size": 96}
CASES = {
    "svd": ("svd", {"n_kv_heads": 2, "rope_theta": 500.0, "rope_scaling": SCALING}),
    "svd_none": ("svd", {"activation": "none"}),
    "cola": ("cola", {"activation": "reduced", "n_kv_heads": 2}),
    "lax": ("lax", {}),
    "lax_gated": ("lax", {"lax_gate": "scalar", "n_kv_heads": 1, "activation": "lowrank"}),
    "lanes": ("full", LANES),
}


def model_of(case):
    """A model in fp64 whose norms and gates are no longer one."""
    family, changes = CASES[case]
    model = LlamaModel(tiny_args(family, **changes))
    model.init_weights()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.double().parameters():
        if parameter.ndim == 1:
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = 0.5 + noise
    return model


def exact(theirs, ours):
    """Let transformers' LLaMA compute angles and norms in fp64, which it does in fp32."""

    def rotations(x, position_ids):
        table = ours.freqs_cis[position_ids]
        return tuple(torch.cat((half, half), -1).to(x.dtype) for half in (table.real, table.imag))

    def normalize(norm, x):
        x = x.unflatten(-1, (-1, len(norm.weight)))  # one lane, or several
        eps = norm.variance_epsilon
        return F.rms_norm(x, norm.weight.shape, norm.weight, eps).flatten(2)

    theirs.model.rotary_emb.forward = rotations
    for module in theirs.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "LaneRMSNorm"):
            module.forward = MethodType(normalize, module)
    return theirs


def load(folder, dtype=torch.float64):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, torch_dtype=dtype)
    return loaded.eval()
