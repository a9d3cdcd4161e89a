# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A training checkpoint in one process: its run's record, its model, its weights on the CPU."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, newest_step, step_folder
from torchtitan_lr.checkpoints.record import DamagedError, Start, check_start, read_step
from torchtitan_lr.checkpoints.safe_metadata import load, read_metadata
from torchtitan_lr.checkpoints.saving import verified
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.parse import in_folder
from torchtitan_lr.config.schema import ITS_MODULE
from torchtitan_lr.data.tokenizer import build_tokenizer, vocabulary
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model, model_shapes
from torchtitan_lr.models.families import FAMILIES, find_family
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.training.fingerprint import TOKENIZER, model_fingerprint, tokenizer_digest

Weights = dict[str, Tensor]
"""Whole parameters on the CPU, by this package's names or by LLaMA's."""

_SECTIONS = ("model", "low_rank", "caat", "training", "validation", "debug")
"""Sections of a run's record that decide its model and its corpora."""


def read_record(step_dir: Path) -> dict[str, Any]:
    """Read the record of a checkpoint's run, which may be a stranger's."""
    try:
        text = json.dumps(read_step(step_dir).run)
    except DamagedError as error:
        raise _no_checkpoint(step_dir, str(error)) from error
    record: dict[str, Any] = json.loads(in_folder(text, step_dir.resolve().parent.parent))
    return record


def read_run_config(step_dir: Path) -> Any:
    """Return the JobConfig of a checkpoint's run as far as its model and corpora are concerned."""
    record = read_record(step_dir)
    kept = {name: record[name] for name in _SECTIONS if name in record}
    model = kept.get("model")
    names = isinstance(model, dict) and {"name", "flavor"} <= model.keys()
    require(names, RUN_CONFIG, "no model's name and flavor", "the complete record of a run")
    return build_job_config([], kept)


def find_step(folder: Path) -> Path:
    """Return the step of a run's dump folder that is resumed; any other folder as it is."""
    if not (folder / RUN_CONFIG).is_file():
        return folder
    try:
        name = read_json(folder / RUN_CONFIG).get("checkpoint", {}).get("folder", "checkpoint")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(str(folder / RUN_CONFIG), str(error), "the run's record") from error
    parts = Path(name).parts if isinstance(name, str) else ("..",)
    fits = parts and parts[0] != os.sep and ".." not in parts
    require(fits, "checkpoint.folder", name, f"a folder within {folder}, or a step's folder")
    newest = newest_step(folder / name)
    want = f"a run with a complete checkpoint in {folder / name}"
    require(newest >= 0, "CHECKPOINT", str(folder), want)
    return Path(step_folder(folder / name, newest))


def build_model_args(config: Any) -> LlamaArgs:
    """Build the model's arguments as the trainer does: the flavor, then the job's overrides."""
    name, flavor = config.model.name, config.model.flavor
    family = find_family(str(name))
    if family is None:
        known = one_of((family.model_name for family in FAMILIES.values()), name)
        raise ConfigError("model.name", name, f"{known}, or {ITS_MODULE}")
    flavors = FLAVORS[family.name]
    require(flavor in flavors, "model.flavor", flavor, one_of(flavors, flavor))
    args = flavors[flavor]
    args.update_from_config(config)
    return args


def load_weights(step_dir: Path, args: LlamaArgs, assets_path: str = "") -> Weights:
    """Verify a checkpoint of any number of ranks and read its weights, all of one dtype.

    ``assets_path`` is the folder of the tokenizer to use with it, if any.
    """
    try:
        record, metadata = verified(step_dir), read_metadata(step_dir)
    except DamagedError as error:
        raise _no_checkpoint(step_dir, str(error)) from error
    stored: dict[str, Any] = metadata.state_dict_metadata
    check_depth(args, len(stored), "CHECKPOINT", step_dir)
    model = {**record.states.get("model", {}), **model_fingerprint(args)}
    if assets_path:
        model[TOKENIZER] = tokenizer_digest(assets_path)
    check_start(Start(str(step_dir)), record, {"model": model})
    try:
        # All are of one dtype. DCP refuses another shape, and the fingerprint other tensors.
        dtype = stored["tok_embeddings.weight"].properties.dtype
        shapes = model_shapes(args).items()
        weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes}
        load(weights, step_dir, metadata)
    # A damaged file can raise any exception; DCP wraps some of them in CheckpointException, which
    # derives from BaseException.
    except (Exception, CheckpointException) as error:
        raise _no_checkpoint(step_dir, "damaged files") from error
    return weights


def as_model(args: LlamaArgs, weights: Weights) -> LlamaModel:
    """Return the model of the trainer with these weights, in evaluation mode."""
    dtype = next(iter(weights.values())).dtype
    model: LlamaModel = empty_model(args).to(dtype).to_empty(device="cpu")
    model.load_state_dict(weights, assign=True)
    return model.eval()


def load_tokenizer(assets_path: str, args: LlamaArgs) -> Any:
    """Return the tokenizer of a folder, which fits the model's vocabulary."""
    tokenizer = build_tokenizer(assets_path)
    want = f"a tokenizer within the model's vocabulary of {args.vocab_size}"
    fits = vocabulary(tokenizer) <= args.vocab_size
    require(fits, "model.hf_assets_path", assets_path, want)
    return tokenizer


def find_device(name: str) -> str:
    """Return the name of the device to compute on: by default cuda if there is one, else cpu."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("--device", name, "a device of this machine, such as cpu") from error
    return name


def check_depth(args: LlamaArgs, tensors: int, key: str, folder: Path) -> None:
    """Refuse more blocks than stored tensors, before a model of so many is built."""
    want = f"the weights of {args.n_layers} blocks, not {tensors} tensors"
    require(args.n_layers <= tensors, key, str(folder), want)


def _no_checkpoint(step_dir: Path, why: str) -> ConfigError:
    """Return the error of a folder that is no whole checkpoint."""
    if not step_dir.is_dir():
        why = "no such folder; a run that trains keeps its newest checkpoint.keep_latest_k steps"
    want = f"a complete checkpoint such as outputs/checkpoint/step-100 (found: {why})"
    return ConfigError("CHECKPOINT", str(step_dir), want)
