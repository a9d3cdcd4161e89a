# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read a folder of safetensors: a Hugging Face LLaMA, or an export."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from torchtitan_lr.checkpoints.folders import HF_INDEX
from torchtitan_lr.config.files import file_within, open_regular, read_json
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.hf.read_llama import read_llama_args
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import MODEL_ARGS, read_model_args
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.training.loading import (
    Weights,
    build_model_args,
    check_depth,
    find_step,
    load_tokenizer,
    load_weights,
    read_run_config,
)

HF_CONFIG = "config.json"
WEIGHTS = "model.safetensors"

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tables that old versions of transformers saved."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def is_export(folder: Path) -> bool:
    """Return whether a folder holds an export rather than a checkpoint."""
    return any((folder / name).is_file() for name in (MODEL_ARGS, HF_CONFIG))


def read_args(folder: Path, key: str = "DIR") -> tuple[LlamaArgs, bool]:
    """Read what a folder says about its model, and whether embedding and head are tied in it.

    Raises:
        ConfigError: The folder has no such model, or one that this package cannot compute.
    """
    if not folder.is_dir() or not is_export(folder):
        want = f"a folder with {HF_CONFIG} (a Hugging Face LLaMA) or {MODEL_ARGS} (an export)"
        raise ConfigError(key, str(folder), want)
    if (folder / MODEL_ARGS).is_file():  # the weights have this package's names
        return read_model_args(folder / MODEL_ARGS), False
    return read_llama_args(folder / HF_CONFIG)


def read_weights(folder: Path, args: LlamaArgs, tied: bool, key: str = "DIR") -> Weights:
    """Read weights by this package's names, all of one dtype: the widest of the files.

    Raises:
        ConfigError: A file is missing or damaged, or a tensor is missing, of another shape,
            quantized, or not of this model.
    """
    stored = _stored(folder, key)
    check_depth(args, len(stored), key, folder)
    expected: dict[str, Any] = {
        name: torch.empty(shape, device="meta") for name, shape in model_shapes(args).items()
    }
    adapter = LlamaStateDictAdapter(args, None, coded=True)
    llama = not (folder / MODEL_ARGS).is_file()
    if llama:
        expected = adapter.to_hf(expected)
    if tied and _EMBEDDING in stored:
        head = stored.setdefault(_HEAD, stored[_EMBEDDING])
        want = f"false: {folder} has an {_HEAD} that differs from the embedding"
        # Readers disagree on such models.
        require(torch.equal(head, stored[_EMBEDDING]), "tie_word_embeddings", True, want)
    for name, tensor in expected.items():
        found = list(stored[name].shape) if name in stored else None
        want = f"a tensor {name} of shape {list(tensor.shape)} (found: {found})"
        require(found == list(tensor.shape), key, str(folder), want)
    left = [name for name in stored if name not in expected and not _IGNORED.fullmatch(name)]
    want = f"the weights of a {args.model_family.model_name}, without {''.join(left[:1])}"
    require(not left, key, str(folder), want)
    dtype = stored[next(iter(expected))].dtype
    for name in expected:
        want = f"floating-point weights in {folder}; {name} is something else"
        require(stored[name].dtype in _DTYPES, key, str(stored[name].dtype), want)
        dtype = torch.promote_types(dtype, stored[name].dtype)
    weights = {name: stored[name].to(dtype) for name in expected}
    if llama:
        weights = adapter.from_hf(weights)
    return {name: weights[name].contiguous() for name in model_shapes(args)}


def read_any(folder: Path) -> tuple[LlamaArgs, Weights, Any, Any]:
    """Read a run's newest step, a step or an export.

    Returns:
        The model's arguments, its weights, its tokenizer, and the JobConfig of its run (None for an
        export).

    Raises:
        ConfigError: One of the files cannot be used.
    """
    folder = find_step(folder)
    if is_export(folder):
        args, tied = read_args(folder, "CHECKPOINT")
        tokenizer = load_tokenizer(str(folder), args)
        return args, read_weights(folder, args, tied, "CHECKPOINT"), tokenizer, None
    config = read_run_config(folder)
    args, assets = build_model_args(config), config.model.hf_assets_path
    tokenizer = load_tokenizer(assets, args)
    return args, load_weights(folder, args, assets), tokenizer, config


def _stored(folder: Path, key: str) -> Weights:
    """Read the tensors of all files by their names there."""
    stored: Weights = {}
    for path in _weight_files(folder, key):
        try:
            with open_regular(path, sys.maxsize):  # a pipe would wait for ever
                pass
            stored |= load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            want = f"a whole file of safetensors ({(str(error) or 'unreadable').splitlines()[0]})"
            raise ConfigError(key, str(path), want) from error
    return stored


def _weight_files(folder: Path, key: str) -> list[Path]:
    """List ``model.safetensors`` if it is there, as transformers prefers it, else the index's."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / HF_INDEX
    if not index.is_file():
        want = f"a folder with {WEIGHTS} or {HF_INDEX}"
        if any(folder.glob("*.bin")):
            want += "; transformers' save_pretrained writes it for a model of .bin files"
        raise ConfigError(key, str(folder), want)
    try:
        names = set(read_json(file_within(folder, HF_INDEX))["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(key, str(index), f"an undamaged index ({error})") from error
    for file in files:
        want = f"all files of {HF_INDEX}: {file.name} is missing"
        require(file.exists(), key, str(folder), want)
    return files
