# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What tells two models apart whose weights have the same names and shapes.

Family, activation, heads, rotary settings, gates and lanes leave no trace in a checkpoint's
tensors: loaded into another model they would go on, silently wrong. So they are recorded, with the
tokenizer, under the keys that set them.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from torchtitan_lr.data.tokenizer import resolve_assets_path, tokenizer_file
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs

TOKENIZER = "model.hf_assets_path"
"""Key of the tokenizer's digest."""

_SHAPE = ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")


def model_fingerprint(args: LlamaArgs) -> dict[str, Any]:
    """Describe the function that a model's weights are part of.

    Left out are the length of the rotary table, the seed and the precision of backward's sums:
    they change no function.

    Args:
        args: The model's arguments.

    Returns:
        Values that JSON keeps, by the TOML key that sets them.
    """
    scaling = args.rope_scaling
    shape = {name: getattr(args, name) for name in _SHAPE}
    shape |= {"n_kv_heads": args.kv_heads, "rope_scaling": scaling and dataclasses.asdict(scaling)}
    fingerprint: dict[str, Any] = {"model.name": f"llama_{args.family}", "model.flavor": shape}
    fingerprint |= args.model_family.fingerprint(args)
    return fingerprint | {"caat.lanes": args.lanes, "caat.sync_fraction": args.sync_fraction}


def tokenizer_digest(assets_path: str) -> str:
    """Digest the file that a tokenizer is built from; where it lies does not matter.

    Args:
        assets_path: ``model.hf_assets_path``.

    Returns:
        ``sha256:`` and the first 16 hexadecimal digits of it; "" where there is no such file.
    """
    file = tokenizer_file(resolve_assets_path(assets_path))
    return "" if file is None else f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def check_fingerprint(stored: dict[str, Any], here: dict[str, Any], step_dir: str | Path) -> None:
    """Refuse a checkpoint of another model, before its weights are loaded.

    Args:
        stored: The checkpoint's fingerprint; empty if it has none.
        here: The model's at hand. What only one of the two has is not compared.
        step_dir: The checkpoint's folder.

    Raises:
        ConfigError: They differ; the first key that does.
    """
    for key, there in stored.items():
        got = here.get(key, there)
        if got == there:
            continue
        if isinstance(there, dict) and isinstance(got, dict):
            names = [name for name in there if got.get(name) != there[name]]
            got = {name: got.get(name) for name in names}
            there = {name: there[name] for name in names}
        want = f"{there!r} as in the checkpoint {step_dir}, whose model is another one"
        raise ConfigError(key, got, want)
