# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Export weights as safetensors: with our names, as Hugging Face's LLaMA, or with model code."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from torchtitan_lr import hf
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.llama_config import CODED, HF_CODE, build_hf_config
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import MODEL_ARGS, write_model_args
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.training.loading import Weights

HF_CONFIG = "config.json"

_CODED_FAMILIES = ("full", "svd", "cola", "lax")
"""Families for which the exported model code has linears."""


def export_factored(
    args: LlamaArgs, weights: Weights, out_dir: Path, dtype: torch.dtype | None = None
) -> int:
    """Write weights with our names, and ``model_args.json``; return the number of parameters."""
    write_model_args(args, out_dir / MODEL_ARGS)
    return _write(weights, out_dir, dtype or _dtype(weights))


def export_hf(
    args: LlamaArgs,
    weights: Weights,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    keep_factors: bool = False,
) -> int:
    """Write weights, ``config.json`` and, for what is no LLaMA, the code of the model.

    Returns the number of written parameters; errors as for `check_hf_exportable`.
    """
    dtype = dtype or _dtype(weights)
    config, converted = for_transformers(args, weights, dtype, keep_factors)
    write_json(out_dir / HF_CONFIG, config)
    if CODED in config:
        shutil.copyfile(Path(hf.__path__[0]) / f"{HF_CODE}.py", out_dir / f"{HF_CODE}.py")
    return _write(converted, out_dir, dtype)


def for_transformers(
    args: LlamaArgs, weights: Weights, dtype: torch.dtype, keep_factors: bool = False
) -> tuple[dict[str, Any], Weights]:
    """Return the contents of ``config.json``, and the weights by LLaMA's names.

    What equals a full-rank LLaMA becomes transformers' own, unless ``keep_factors``: factors are
    multiplied in fp32 or better. Errors as for `check_hf_exportable`.
    """
    check_hf_exportable(args, keep_factors)
    coded = not is_hf_llama(args, keep_factors)
    if args.low_rank and not coded:
        wide = torch.promote_types(_dtype(weights), torch.float32)
        weights = {name: tensor.to(wide) for name, tensor in weights.items()}
    adapter = LlamaStateDictAdapter(args, None, coded=coded)
    return build_hf_config(args, dtype, coded), adapter.to_hf(weights)


def is_hf_llama(args: LlamaArgs, keep_factors: bool = False) -> bool:
    """Return whether the export is transformers' own LLaMA."""
    adapter = LlamaStateDictAdapter(args, hf_assets_path=None)
    return adapter.is_llama and not (keep_factors and args.low_rank)


def check_hf_exportable(args: LlamaArgs, keep_factors: bool = False) -> None:
    """Raise a ConfigError for another package's family, or for factors where there are none."""
    if keep_factors and not args.low_rank:
        name = args.model_family.model_name
        raise ConfigError("--keep_factors", name, "a low-rank family: llama_full has no factors")
    if not is_hf_llama(args) and args.family not in _CODED_FAMILIES:
        names = ", ".join(f"llama_{family}" for family in _CODED_FAMILIES)
        want = f"one of {names} for transformers; export --format factored writes every family"
        raise ConfigError("model.name", args.model_family.model_name, want)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a dictionary, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def _dtype(weights: Weights) -> torch.dtype:
    return next(iter(weights.values())).dtype


def _write(weights: Weights, out_dir: Path, dtype: torch.dtype) -> int:
    """Write one file, or numbered files of at most 5 GB and their index."""
    rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
    try:
        save_torch_state_dict(rounded, out_dir, max_shard_size="5GB")
    except SafetensorError as error:  # an error of the system, such as a full disk
        raise OSError(str(error)) from error
    for file in out_dir.glob("*.safetensors"):  # safetensors lets only the owner read it
        file.chmod(next(out_dir.glob("*.json")).stat().st_mode)
    return sum(tensor.numel() for tensor in rounded.values())
