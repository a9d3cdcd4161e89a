# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run's states belong to, by the TOML keys that set it.

Family, activation, heads, rotary settings, gates and lanes do not change names or shapes, so a
checkpoint could be loaded into a different model without an error. Nor do shapes tell residuals of
another layout, or a position in other data.
"""

import dataclasses
import hashlib
import operator
from typing import TYPE_CHECKING, Any

from torchtitan_lr.checkpoints.folders import OUTER, RESIDUALS, TRAIN_STATE
from torchtitan_lr.checkpoints.run_record import data_ranks
from torchtitan_lr.config.files import read_regular
from torchtitan_lr.config.schema import OPTIMIZER, meanings
from torchtitan_lr.data.tokenizer import HF_FILE, resolve_assets_path
from torchtitan_lr.optim.entries import like, unread_keys

if TYPE_CHECKING:  # checks use this before torch is loaded
    from torchtitan_lr.models.args import LlamaArgs

TOKENIZER = "model.hf_assets_path"
"""Key of the tokenizer's digest."""

_SHAPE = ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")


def identity_of(config: Any, ranks: int, args: Any, tokenizer: str) -> dict[str, dict[str, Any]]:
    """Return what a run's states belong to, by state, except its data, which are prepared later.

    ``args`` are the model's arguments (of another package's model nothing is known), ``tokenizer``
    is its digest.
    """
    from torchtitan_lr.models.args import LlamaArgs

    identity: dict[str, dict[str, Any]] = {TRAIN_STATE: {}, "model": {}, "optimizer": {}}
    if isinstance(args, LlamaArgs):
        identity["model"] = model_fingerprint(args) | {TOKENIZER: tokenizer}
    unread = unread_keys(config.optimizer.name)
    for key, meaning in meanings().items():
        if meaning is OPTIMIZER and not key.startswith(unread):
            identity["optimizer"][key] = operator.attrgetter(key)(config)
    rule = identity["optimizer"]["optimizer.name"] = like(config.optimizer.name)
    if config.outer.every:
        for key in ("outer.bits", "outer.feedback", "outer.fragments"):
            identity.setdefault(OUTER, {})[key] = operator.attrgetter(key)(config)
    layout, section = config.parallelism, config.grad_compression
    shards = data_ranks(config, ranks) // layout.data_parallel_replicate_degree
    if section.codec != "none" and shards * layout.context_parallel_degree > 1:
        # A residual belongs to one rank's part of the batch, and is flat.
        identity[RESIDUALS] = {"NGPU": ranks, "optimizer.name": rule}
        for kind in ("tensor_parallel", "context_parallel", "data_parallel_replicate"):
            key = f"{kind}_degree"
            identity[RESIDUALS][f"parallelism.{key}"] = getattr(layout, key)
        identity[RESIDUALS]["parallelism.tp_plan"] = layout.tp_plan
        for key in ("layers", "min_size"):
            identity[RESIDUALS][f"grad_compression.{key}"] = getattr(section, key)
    return identity


def model_fingerprint(args: "LlamaArgs") -> dict[str, Any]:
    """Return the settings that define the model's function, as JSON values.

    The length of the rotary table, the seed and the precision of backward's sums do not change it.
    """
    scaling = args.rope_scaling
    shape = {name: getattr(args, name) for name in _SHAPE}
    shape |= {"n_kv_heads": args.kv_heads, "rope_scaling": scaling and dataclasses.asdict(scaling)}
    fingerprint: dict[str, Any] = {"model.name": f"llama_{args.family}"}
    fingerprint |= {f"model.{name}": value for name, value in shape.items()}
    fingerprint |= args.model_family.fingerprint(args)
    return fingerprint | {"caat.lanes": args.lanes, "caat.sync_fraction": args.sync_fraction}


def tokenizer_digest(assets_path: str) -> str:
    """Return ``sha256:`` and 16 digits of the digest of the tokenizer's file; "" without one."""
    file = resolve_assets_path(assets_path) / HF_FILE
    digest = hashlib.sha256(read_regular(file)).hexdigest() if file.is_file() else ""
    return digest and f"sha256:{digest[:16]}"
