# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Export weights as safetensors: with our names, as Hugging Face's LLaMA, or with model code."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchtitan_lr import hf
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.read_llama import CODED, CODED_ACT, CODED_KEYS
from torchtitan_lr.hf.shards import (
    DEFAULT_SHARD,
    Piece,
    Tensors,
    WeightSource,
    write_json,
    write_shards,
)
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import MODEL_ARGS, write_model_args
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter

HF_CONFIG = "config.json"
HF_CODE = "modeling_torchtitan_lr"
"""The module that an export of a model that is no LLaMA holds."""

_CODED_FAMILIES = ("full", "svd", "cola", "lax")
"""Families for which the exported model code has linears."""


def export_factored(
    source: WeightSource,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    max_size: str = DEFAULT_SHARD,
) -> int:
    """Write the weights with our names, and ``model_args.json``.

    Args:
        source: The weights.
        out_dir: An existing folder.
        dtype: Precision of the files; the model's own by default.
        max_size: Largest size of a file, such as ``5GB``.

    Returns:
        The number of written parameters.
    """
    written = write_shards(source, _as_they_are(source), out_dir, dtype, max_size)
    write_model_args(source.args, out_dir / MODEL_ARGS)
    return written


def export_hf(
    source: WeightSource,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    max_size: str = DEFAULT_SHARD,
    keep_factors: bool = False,
) -> int:
    """Write weights, ``config.json`` and, for what is no LLaMA, the code of the model.

    What equals a full-rank LLaMA becomes transformers' own; factors are multiplied in fp32 or
    better and rounded once. All others keep their tensors, by LLaMA's names.

    Args:
        source: The weights.
        out_dir: An existing folder.
        dtype: Precision of the files; the model's own by default.
        max_size: Largest size of a file, such as ``5GB``.
        keep_factors: Whether llama_svd keeps its factors too.

    Returns:
        The number of written parameters.

    Raises:
        ConfigError: The exported code cannot compute this model.
    """
    args = source.args
    check_hf_exportable(args, keep_factors)
    dtype = dtype or source.dtype
    coded = not is_hf_llama(args, keep_factors)
    written = write_shards(source, _as_llama(source, coded), out_dir, dtype, max_size)
    build = build_coded_config if coded else build_hf_config
    write_json(out_dir / HF_CONFIG, build(args, dtype))
    if coded:
        shutil.copyfile(Path(hf.__path__[0]) / f"{HF_CODE}.py", out_dir / f"{HF_CODE}.py")
    return written


def is_hf_llama(args: LlamaArgs, keep_factors: bool = False) -> bool:
    """Return whether the export is transformers' own LLaMA."""
    adapter = LlamaStateDictAdapter(args, hf_assets_path=None)
    return adapter.is_llama and not (keep_factors and args.low_rank)


def check_hf_exportable(args: LlamaArgs, keep_factors: bool = False) -> None:
    """Raise for a model that transformers cannot run.

    Raises:
        ConfigError: The family is not one of this package, or factors are to be kept where there
            are none.
    """
    if keep_factors and not args.low_rank:
        name = args.model_family.model_name
        raise ConfigError("--keep_factors", name, "a low-rank family: llama_full has no factors")
    if not is_hf_llama(args) and args.family not in _CODED_FAMILIES:
        names = ", ".join(f"llama_{family}" for family in _CODED_FAMILIES)
        raise ConfigError("--format", "hf", f"'factored' for this model: hf exports {names}")


def build_hf_config(args: LlamaArgs, dtype: torch.dtype) -> dict[str, Any]:
    """Return the configuration of a model for transformers' LlamaForCausalLM.

    The rotary settings have the format of transformers before version 5, which later versions also
    read.

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
        "max_position_embeddings": args.max_seq_len,
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


def build_coded_config(args: LlamaArgs, dtype: torch.dtype) -> dict[str, Any]:
    """Return the configuration of a model whose code is exported with it: LLaMA's, and more."""
    name = "TorchtitanLRForCausalLM"
    return build_hf_config(args, dtype) | {
        "architectures": [name],
        "auto_map": {"AutoModelForCausalLM": f"{HF_CODE}.{name}"},
        "hidden_act": CODED_ACT,
        CODED: {key: getattr(args, key) for key in CODED_KEYS},
    }


def _as_they_are(source: WeightSource) -> Iterator[Piece]:
    for name in source.shapes:
        yield Piece((name,), lambda tensors: tensors)


def _as_llama(source: WeightSource, coded: bool) -> Iterator[Piece]:
    """Yield one piece per tensor of the export, of one stored tensor or of two factors."""
    adapter = LlamaStateDictAdapter(source.args, hf_assets_path=None, coded=coded)

    def convert(tensors: Tensors) -> Tensors:
        dtype = torch.promote_types(source.dtype, torch.float32)
        weights: Tensors = adapter.to_hf({name: t.to(dtype) for name, t in tensors.items()})
        return weights

    for name in source.shapes:
        if coded:
            yield Piece((name,), adapter.to_hf)
        elif name.endswith(".B.weight"):
            yield Piece((name, name.removesuffix("B.weight") + "A.weight"), convert)
        elif not name.endswith(".A.weight"):
            yield Piece((name,), convert)
