# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run's states belong to, by the TOML keys that set its parts.

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
from torchtitan_lr.config import schema
from torchtitan_lr.config.files import read_regular
from torchtitan_lr.data.tokenizer import HF_FILE, resolve_assets_path
from torchtitan_lr.optim.entries import like, unread_keys

if TYPE_CHECKING:  # checks use this before torch is loaded
    from torchtitan_lr.models.args import LlamaArgs

TOKENIZER = "model.hf_assets_path"  # key of the tokenizer's digest

_KEYS = {"family": "model.name", "max_seq_len": "training.seq_len", "init_seed": "debug.seed"}
"""Keys of a model's arguments that have another name in the configuration."""


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
    for key, meaning in schema.meanings().items():
        if meaning is schema.OPTIMIZER and not key.startswith(unread):
            identity["optimizer"][key] = operator.attrgetter(key)(config)
    rule = identity["optimizer"]["optimizer.name"] = like(config.optimizer.name)
    if config.outer.every:
        keys = "outer.bits", "outer.feedback", "outer.fragments", "outer.overlap"
        identity[OUTER] = {key: operator.attrgetter(key)(config) for key in keys}
    layout, section = config.parallelism, config.grad_compression
    shards = data_ranks(config, ranks) // layout.data_parallel_replicate_degree
    if section.codec != "none" and shards * layout.context_parallel_degree > 1:
        of_layout = {key: operator.attrgetter(key)(config) for key in schema.OF_RESIDUALS}
        identity[RESIDUALS] = {"NGPU": ranks, "optimizer.name": rule} | of_layout
    return identity


def model_fingerprint(args: "LlamaArgs") -> dict[str, Any]:
    """Return the arguments that define the model's function, by key, as JSON values.

    They are those whose keys have the meaning `MODEL`.
    """
    values = dataclasses.asdict(args)
    del values["_enforced"]  # torchtitan's, of no model
    values |= {"family": args.model_family.model_name, "n_kv_heads": args.kv_heads}
    sections: dict[str, str] = {}
    for section, declared in (("low_rank", schema.LowRank), ("caat", schema.Caat)):
        sections |= {option.name: section for option in dataclasses.fields(declared)}
    fingerprint: dict[str, Any] = {}
    for name, value in values.items():
        key = _KEYS.get(name, f"{sections.get(name, 'model')}.{name}")
        if schema.meaning_of(key) is schema.MODEL:
            fingerprint[key] = value
    return fingerprint


def tokenizer_digest(assets_path: str) -> str:
    """Return ``sha256:`` and 16 digits of the digest of the tokenizer's file; "" without one."""
    file = resolve_assets_path(assets_path) / HF_FILE
    digest = hashlib.sha256(read_regular(file)).hexdigest() if file.is_file() else ""
    return digest and f"sha256:{digest[:16]}"
