# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read a folder of safetensors: a Hugging Face LLaMA, or an export."""

import re
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from torchtitan_lr.checkpoints.folders import HF_INDEX
from torchtitan_lr.config.files import file_within, open_regular, read_json
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.hf.export import HF_CONFIG
from torchtitan_lr.hf.llama_config import read_llama_args
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import MODEL_ARGS, read_model_args
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.training import loading
from torchtitan_lr.training.loading import Weights

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

    A ConfigError says that it has no such model, or one that this package cannot compute.
    """
    want = f"a folder with {HF_CONFIG} (a Hugging Face LLaMA) or {MODEL_ARGS} (an export)"
    require(is_export(folder), key, str(folder), want)
    if (folder / MODEL_ARGS).is_file():  # the weights have this package's names
        return read_model_args(folder / MODEL_ARGS), False
    return read_llama_args(folder / HF_CONFIG)


def read_weights(folder: Path, args: LlamaArgs, tied: bool, key: str = "DIR") -> Weights:
    """Read weights by this package's names, all of one dtype: the widest of the files.

    They stay in the files until they are used. A ConfigError says that a file is missing or
    damaged, or a tensor is missing, of another shape, quantized, or not of this model.
    """
    stored = _stored(folder, key)
    loading.check_depth(args, len(stored), key, folder)
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
        want = f"floating-point weights in {folder}; {name} is something else"
        require(stored[name].dtype in _DTYPES, key, str(stored[name].dtype), want)
    left = [name for name in stored if name not in expected and not _IGNORED.fullmatch(name)]
    want = f"the weights of a {args.model_family.model_name}, without {''.join(left[:1])}"
    require(not left, key, str(folder), want)
    dtype = reduce(torch.promote_types, (stored[name].dtype for name in expected))
    weights = {name: stored[name].to(dtype) for name in expected}
    if llama:
        weights = adapter.from_hf(weights)
    return {name: weights[name].contiguous() for name in model_shapes(args)}


def read_any(folder: Path) -> tuple[LlamaArgs, Weights, Any, Any]:
    """Read a run's newest step, a step or an export: its arguments, weights and tokenizer.

    The last value is the JobConfig of the run, None for an export. A ConfigError says that one of
    the files cannot be used.
    """
    folder = loading.find_step(folder)
    if is_export(folder):
        args, tied = read_args(folder, "CHECKPOINT")
        tokenizer = loading.load_tokenizer(str(folder), args)
        return args, read_weights(folder, args, tied, "CHECKPOINT"), tokenizer, None
    config = loading.read_run_config(folder)
    args, assets = loading.build_model_args(config), config.model.hf_assets_path
    tokenizer = loading.load_tokenizer(assets, args)
    return args, loading.load_weights(folder, args, assets), tokenizer, config


def _stored(folder: Path, key: str) -> Weights:
    """Read the tensors of ``model.safetensors``, as transformers prefers it, else the index's."""
    files = [folder / WEIGHTS]
    if not files[0].exists():
        want = f"a folder with {WEIGHTS} or {HF_INDEX}"
        if any(folder.glob("*.bin")):
            want += "; transformers' save_pretrained writes it for a model of .bin files"
        require((folder / HF_INDEX).is_file(), key, str(folder), want)
        try:
            names = set(read_json(file_within(folder, HF_INDEX))["weight_map"].values())
            files = [folder / Path(name).name for name in sorted(names)]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            want = f"an undamaged index ({error})"
            raise ConfigError(key, str(folder / HF_INDEX), want) from error
    stored: Weights = {}
    for path in files:
        try:
            with open_regular(path, sys.maxsize):  # a pipe would wait for ever
                pass
            stored |= load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            want = f"a whole file of safetensors ({(str(error) or 'unreadable').splitlines()[0]})"
            raise ConfigError(key, str(path), want) from error
    return stored
