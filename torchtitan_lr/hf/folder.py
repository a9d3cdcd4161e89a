# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A folder that transformers can load: weights, configuration, tokenizer and model card."""

from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan_lr.config.files import read_json
from torchtitan_lr.data.tokenizer import (
    HF_FILE,
    build_tokenizer,
    resolve_assets_path,
    vocabulary,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.card import Exported, write_card
from torchtitan_lr.hf.export import HF_CONFIG, export_hf, is_hf_llama
from torchtitan_lr.hf.shards import write_json
from torchtitan_lr.hf.tokenizer import export_tokenizer
from torchtitan_lr.hf.weights import StoredWeights
from torchtitan_lr.models.args import LlamaArgs

# Not the padding's: transformers would leave that row of the embedding out of training.
_MODEL_IDS = ("bos_token_id", "eos_token_id")


def find_tokenizer(config: Any, args: LlamaArgs) -> str:
    """Find a run's tokenizer.

    Returns:
        ``model.hf_assets_path``; "" if there is no tokenizer any more.

    Raises:
        ConfigError: The tokenizer is damaged, or has more tokens than the model.
    """
    path: str = config.model.hf_assets_path
    if not (resolve_assets_path(path) / HF_FILE).is_file():
        return ""
    if vocabulary(build_tokenizer(config)) > args.vocab_size:
        want = f"a tokenizer within the model's vocabulary of {args.vocab_size}"
        raise ConfigError("model.hf_assets_path", path, want)
    return path


def add_tokenizer(config: Any, out_dir: Path, length: int) -> dict[str, Any]:
    """Write a run's tokenizer into an export; return what `export_tokenizer` does."""
    folder = resolve_assets_path(config.model.hf_assets_path)
    return export_tokenizer(build_tokenizer(config), folder, out_dir, length)


def export_folder(
    source: StoredWeights,
    config: Any,
    out_dir: Path,
    dtype: torch.dtype | None,
    max_size: str,
    keep_factors: bool = False,
    assets: str = "",
    licence: str = "",
) -> None:
    """Export a checkpoint for transformers, with all that goes along.

    Args:
        source: The checkpoint's weights.
        config: The run's record, sections as attributes.
        out_dir: An existing folder.
        dtype: Precision of the files; the checkpoint's by default.
        max_size: Largest size of a file of weights, such as ``5GB``.
        keep_factors: Whether llama_svd keeps its factors.
        assets: What `find_tokenizer` found.
        licence: The licence of the weights; "" for that of their origin.

    Raises:
        ConfigError: As for `export_hf`, or a file of the checkpoint is damaged.
    """
    args = source.args
    written = export_hf(source, out_dir, dtype, max_size, keep_factors)
    if assets:
        ids = add_tokenizer(config, out_dir, args.max_seq_len)
        model = read_json(out_dir / HF_CONFIG)
        write_json(out_dir / HF_CONFIG, model | {k: ids[k] for k in _MODEL_IDS if k in ids})
    kind: Literal["hf", "coded"] = "hf" if is_hf_llama(args, keep_factors) else "coded"
    write_card(args, config, source.step_dir, Exported(out_dir, written, kind, licence))
