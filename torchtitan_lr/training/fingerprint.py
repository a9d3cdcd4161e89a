# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Model fingerprint: the settings that a checkpoint's tensor names and shapes do not determine.

Family, activation, heads, rotary settings, gates and lanes do not change names or shapes, so a
checkpoint could be loaded into a different model without an error. The fingerprint records these
settings and the tokenizer, under the TOML keys that set them.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.config.files import read_regular
from torchtitan_lr.data.tokenizer import HF_FILE, resolve_assets_path
from torchtitan_lr.errors import ConfigError

if TYPE_CHECKING:  # checks use this before torch is loaded
    from torchtitan_lr.models.args import LlamaArgs

TOKENIZER = "model.hf_assets_path"
"""Key of the tokenizer's digest."""

_SHAPE = ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")


def model_fingerprint(args: "LlamaArgs") -> dict[str, Any]:
    """Return the settings that define the model's function.

    The length of the rotary table, the seed and the precision of backward's sums are left out:
    they do not change the function.

    Returns:
        JSON values by the TOML key that sets them.
    """
    scaling = args.rope_scaling
    shape = {name: getattr(args, name) for name in _SHAPE}
    shape |= {"n_kv_heads": args.kv_heads, "rope_scaling": scaling and dataclasses.asdict(scaling)}
    fingerprint: dict[str, Any] = {"model.name": f"llama_{args.family}", "model.flavor": shape}
    fingerprint |= args.model_family.fingerprint(args)
    return fingerprint | {"caat.lanes": args.lanes, "caat.sync_fraction": args.sync_fraction}


def tokenizer_digest(assets_path: str) -> str:
    """Return a digest of the contents of the tokenizer's file.

    Returns:
        ``sha256:`` and the first 16 hexadecimal digits; "" if there is no tokenizer file.
    """
    file = resolve_assets_path(assets_path) / HF_FILE
    digest = hashlib.sha256(read_regular(file)).hexdigest() if file.is_file() else ""
    return digest and f"sha256:{digest[:16]}"


def check_fingerprint(
    stored: dict[str, Any],
    here: dict[str, Any],
    step_dir: str | Path,
    other_model: bool = False,
    allow_unverified: bool = False,
) -> None:
    """Raise for a checkpoint of another model; call this before loading its weights.

    Args:
        stored: The checkpoint's fingerprint.
        here: The current model's; empty for another package's model.
        step_dir: The checkpoint's folder.
        other_model: Whether the checkpoint may hold another model; its lanes are compared anyway.
        allow_unverified: Whether unknown keys are ignored.

    Raises:
        ConfigError: The fingerprints differ; the error names the first differing key. Or the
            checkpoint's has an unknown key, as after a flipped bit.
    """
    for key, there in stored.items():
        if here and key not in {*here, TOKENIZER} and not (other_model or allow_unverified):
            want = f"a manifest without {key!r}, a key that no model of this version has; "
            want += "checkpoint.allow_unverified = true ignores it"
            raise ConfigError("checkpoint", str(step_dir), want)
        got = here.get(key, there)
        # Weights of other lanes fit in name and shape, but no family could go on from them.
        if got == there or (other_model and not key.startswith("caat.")):
            continue
        if isinstance(there, dict) and isinstance(got, dict):
            names = [name for name in there if got.get(name) != there[name]]
            got = {name: got.get(name) for name in names}
            there = {name: there[name] for name in names}
        want = f"{there!r} as in the checkpoint {step_dir}, which holds another model"
        raise ConfigError(key, got, want)
