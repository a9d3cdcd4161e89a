# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ``config.json`` of a Hugging Face LLaMA, or of an export with code, written and read.

An export with code has LLaMA's keys, and a table of what the model has beside them.
"""

from pathlib import Path
from typing import Any

import torch

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.titan.specs import RoPEScalingArgs

HF_CODE = "modeling_torchtitan_lr"
"""The module that an export of a model that is no LLaMA holds."""
CODED = "torchtitan_lr"
"""The table that an export has if it brings its code."""
_CODED_ACT = "torchtitan_lr: load with trust_remote_code=True"
"""Its ``hidden_act``: LLaMA's own class fails with it, where it would draw the linears anew."""
_CODED_KEYS = (
    *("family", "activation", "rank_attention", "rank_ffn"),
    *("lax_gate", "lanes", "sync_fraction"),
)
"""What the table says, by the names of `LlamaArgs`."""

_NUMBERS = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
}
"""Keys with the names of `LlamaArgs`, whose defaults of the last ones are LLaMA's."""

_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


def build_hf_config(args: LlamaArgs, dtype: torch.dtype, coded: bool = False) -> dict[str, Any]:
    """Return ``config.json``; the rotary settings are of version 4, which later versions read."""
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {theirs: getattr(args, ours) for theirs, ours in _NUMBERS.items()}
    config |= {
        "num_key_value_heads": args.kv_heads,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # The tokenizer defines these ids; LLaMA's defaults would be other tokens.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if args.rope_scaling is not None:
        numbers = {theirs: getattr(args.rope_scaling, ours) for theirs, ours in _SCALING.items()}
        config["rope_scaling"] = {"rope_type": "llama3"} | numbers
    if coded:
        name = "TorchtitanLRForCausalLM"
        config["architectures"] = [name]
        config["auto_map"] = {"AutoModelForCausalLM": f"{HF_CODE}.{name}"}
        config["hidden_act"] = _CODED_ACT
        config[CODED] = {key: getattr(args, key) for key in _CODED_KEYS}
    return config


def read_llama_args(path: Path) -> tuple[LlamaArgs, bool]:
    """Read a configuration of transformers' LLaMA, of version 4 or 5.

    Returns the model's arguments, ``llama_full``'s for a LLaMA without a table of ours, and whether
    embedding and head are tied over there. What shows in the weights, such as biases, is not read.
    A ConfigError names a setting that ``llama_full`` does not have.
    """
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        want = f"the configuration of a Hugging Face LLaMA ({error})"
        raise ConfigError("DIR", str(path), want) from error
    kind, act, table = (values.get(key) for key in ("model_type", "hidden_act", CODED))
    require(kind == "llama", "model_type", kind, f"'llama' in {path}")
    fits = act in ("silu", "swish") if table is None else act == _CODED_ACT
    require(fits, "hidden_act", act, f"'silu', SwiGLU's, in {path}")
    fits = table is None or (isinstance(table, dict) and set(table) == set(_CODED_KEYS))
    require(fits, CODED, table, f"a table of {', '.join(_CODED_KEYS)}, in {path}")
    # One table in version 5, two keys in version 4.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    require(isinstance(rope, dict), "rope_scaling", rope, f"a table in {path}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    want = f"'default' or 'llama3' as rope_type in {path}"
    require(kind in ("default", "llama3"), "rope_scaling", kind, want)
    # What the weights do not show.
    require(not values.get("rope_interleaved"), "rope_interleaved", True, f"false in {path}")
    for part in (values, rope):
        share = part.get("partial_rotary_factor") or 1
        require(share == 1, "partial_rotary_factor", share, f"1: whole heads, in {path}")
    given: dict[str, Any] = {ours: values.get(theirs) for theirs, ours in _NUMBERS.items()}
    given["rope_theta"] = rope.get("rope_theta", values.get("rope_theta"))
    for name in ("norm_eps", "max_seq_len", "rope_theta"):
        if given[name] is None:
            del given[name]
    if kind == "llama3":
        numbers = {ours: rope.get(theirs) for theirs, ours in _SCALING.items()}
        given["rope_scaling"] = RoPEScalingArgs(**numbers)
    dense = {"family": "full", "rank_attention": 0, "rank_ffn": 0, "activation": "fullrank"}
    given |= dense if table is None else table
    try:
        args = LlamaArgs(**given)
    except ConfigError as error:
        raise ConfigError(error.key, error.got, f"{error.want}, in {path}") from error
    return args, bool(values.get("tie_word_embeddings"))
