# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Export weights as safetensors, with our names or Hugging Face's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lr.compat.titan import drop_marker
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter

WEIGHTS = "model.safetensors"
MODEL_ARGS = "model_args.json"
HF_CONFIG = "config.json"


def export_factored(model: LlamaModel, out_dir: Path, dtype: torch.dtype | None = None) -> None:
    """Write ``model.safetensors`` with our names, and ``model_args.json``.

    Args:
        model: The model, with plain tensors.
        out_dir: An existing folder.
        dtype: Precision of the file; the model's own by default.
    """
    _save(model.state_dict(), out_dir, dtype)
    values = drop_marker(dataclasses.asdict(model.model_args))
    _write_json(out_dir / MODEL_ARGS, values)


def export_hf(model: LlamaModel, out_dir: Path, dtype: torch.dtype | None = None) -> None:
    """Write a full-rank Hugging Face LLaMA: ``model.safetensors`` and ``config.json``.

    Args:
        model: The model, with plain tensors, of a family for which this is exact.
        out_dir: An existing folder.
        dtype: Precision of the file; the model's own by default. Factors are multiplied in fp32
            or better and rounded once.

    Raises:
        ConfigError: The model has no equivalent full-rank LLaMA.
    """
    check_hf_exportable(model.model_args)
    adapter = LlamaStateDictAdapter(model.model_args, hf_assets_path=None)
    own = next(model.parameters()).dtype
    wide = {k: v.to(torch.promote_types(own, torch.float32)) for k, v in model.state_dict().items()}
    _save(adapter.to_hf(wide), out_dir, dtype or own)
    _write_json(out_dir / HF_CONFIG, build_hf_config(model.model_args, dtype or own))


def check_hf_exportable(args: LlamaArgs) -> None:
    """Raise for a model without an exact full-rank form.

    Args:
        args: The model's arguments.

    Raises:
        ConfigError: The family is cola or lax, or svd without SwiGLU's SiLU, or the model has lanes
            with private channels.
    """
    if not LlamaStateDictAdapter(args, hf_assets_path=None).is_llama:
        want = (
            "'factored' for this model: only llama_full, and llama_svd with"
            " low_rank.activation 'fullrank', equal a full-rank LLaMA, and without caat.lanes"
        )
        raise ConfigError("--format", "hf", want)


def build_hf_config(args: LlamaArgs, dtype: torch.dtype) -> dict[str, Any]:
    """Return the configuration of a model for transformers' LlamaForCausalLM.

    The rotary settings have the format of transformers before version 5, which later versions also
    read.

    Args:
        args: The model's arguments.
        dtype: Precision of the weights.

    Returns:
        The contents of ``config.json``.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": args.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # The tokenizer defines these ids; LLaMA's defaults would be other tokens.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    scaling = args.rope_scaling
    if scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return config


def _save(weights: dict[str, Tensor], out_dir: Path, dtype: torch.dtype | None) -> None:
    tensors = {name: value.to(dtype or value.dtype).contiguous() for name, value in weights.items()}
    path = out_dir / WEIGHTS
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors creates a file that only its owner may read


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
