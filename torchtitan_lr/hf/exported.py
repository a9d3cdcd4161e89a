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
from torchtitan_lr.hf.export import CODED, CODED_ACT, CODED_KEYS, HF_CONFIG, NUMBERS, SCALING
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.titan.specs import RoPEScalingArgs
from torchtitan_lr.training import loading
from torchtitan_lr.training.loading import Weights

WEIGHTS = "model.safetensors"

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Tables that old versions of transformers saved.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_args(folder: Path, key: str = "DIR") -> tuple[LlamaArgs, bool]:
    """Read the ``config.json`` of a LLaMA, of transformers 4 or 5, or of an export with code.

    Returns the model's arguments, and whether embedding and head are tied over there. What shows in
    the weights, such as biases, is not read. A ConfigError says that there is no such file, or
    names a setting that this package does not have.
    """
    path = folder / HF_CONFIG
    want = f"a folder with the {HF_CONFIG} of a Hugging Face LLaMA or of an export"
    require(path.is_file(), key, str(folder), want)
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(key, str(path), f"the configuration of a LLaMA ({error})") from error
    kind, act, table = (values.get(key) for key in ("model_type", "hidden_act", CODED))
    require(kind == "llama", "model_type", kind, f"'llama' in {path}")
    fits = act in ("silu", "swish") if table is None else act == CODED_ACT
    require(fits, "hidden_act", act, f"'silu', SwiGLU's, in {path}")
    fits = table is None or (isinstance(table, dict) and set(table) == set(CODED_KEYS))
    require(fits, CODED, table, f"a table of {', '.join(CODED_KEYS)}, in {path}")
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
    given: dict[str, Any] = {ours: values.get(theirs) for theirs, ours in NUMBERS.items()}
    given["rope_theta"] = rope.get("rope_theta", values.get("rope_theta"))
    for name in ("norm_eps", "max_seq_len", "rope_theta"):
        if given[name] is None:
            del given[name]
    if kind == "llama3":
        numbers = {ours: rope.get(theirs) for theirs, ours in SCALING.items()}
        given["rope_scaling"] = RoPEScalingArgs(**numbers)
    dense = {"family": "full", "rank_attention": 0, "rank_ffn": 0, "activation": "fullrank"}
    given |= dense if table is None else table
    try:
        args = LlamaArgs(**given)
    except ConfigError as error:
        raise ConfigError(error.key, error.got, f"{error.want}, in {path}") from error
    return args, bool(values.get("tie_word_embeddings"))


def read_weights(folder: Path, args: LlamaArgs, tied: bool, key: str = "DIR") -> Weights:
    """Read weights by this package's names, all of one dtype: the widest of the files.

    They stay in the files until they are used. A ConfigError says that a file is missing or
    damaged, or a tensor is missing, of another shape, quantized, or not of this model.
    """
    stored = _stored(folder, key)
    loading.check_depth(args, len(stored), key, folder)
    shapes, adapter = model_shapes(args), LlamaStateDictAdapter(args, None, coded=True)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    expected = adapter.to_hf(empty)
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
    weights = adapter.from_hf({name: stored[name].to(dtype) for name in expected})
    return {name: weights[name].contiguous() for name in shapes}


def read_any(folder: Path) -> tuple[LlamaArgs, Weights, Any, Any]:
    """Read a run's newest step, a step or an export: its arguments, weights and tokenizer.

    The last value is the JobConfig of the run, None for an export. A ConfigError says that one of
    the files cannot be used.
    """
    folder = loading.find_step(folder)
    if (folder / HF_CONFIG).is_file():
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
