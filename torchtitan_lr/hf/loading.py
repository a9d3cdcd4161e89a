# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Load a training checkpoint into a model in one process, without a process group."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_lr.checkpoints.folders import (
    RUN_CONFIG,
    TRAINING_STATES,
    newest_step,
    step_folder,
)
from torchtitan_lr.checkpoints.record import DamagedError, read_step
from torchtitan_lr.checkpoints.resume import Start, check_start
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.checkpoints.saving import verified
from torchtitan_lr.config.build import build_job_config, check_record
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.parse import in_folder
from torchtitan_lr.config.schema import ITS_MODULE
from torchtitan_lr.data.tokenizer import HUB, build_tokenizer, require_cached, vocabulary
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.hf.folder_weights import check_depth
from torchtitan_lr.hf.weights import StoredWeights, no_checkpoint
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model, model_shapes
from torchtitan_lr.models.families import FAMILIES, find_family
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan.device import keep_freed_memory
from torchtitan_lr.training.fingerprint import TOKENIZER, model_fingerprint, tokenizer_digest

SECTIONS = ("model", "low_rank", "caat", "training", "validation", "parallelism", "debug")
"""Sections of a run's record that decide its model, its corpora and its layout."""


def read_run_config(step_dir: Path, config_file: Path | None = None) -> Any:
    """Read the configuration of a checkpoint's run.

    Args:
        step_dir: The checkpoint, ``<dump folder>/<checkpoint folder>/step-<n>``.
        config_file: A TOML to read instead of the run's saved configuration.

    Returns:
        The job's sections as attributes: ``config.model.flavor``.

    Raises:
        ConfigError: There is no readable configuration.
    """
    if config_file is not None:
        return build_job_config([f"--job.config_file={config_file}"])
    record = read_record(step_dir)
    checked = check_record({name: record[name] for name in SECTIONS if name in record})
    return json.loads(json.dumps(checked), object_hook=lambda items: SimpleNamespace(**items))


def named_step(step_dir: Path) -> Path:
    """Return a step's folder as its run names it: two levels below the run's dump folder."""
    return step_dir.resolve()


def read_record(step_dir: Path) -> dict[str, Any]:
    """Read the record of a checkpoint's run; errors as for `read_run_config`.

    A record may be somebody else's. The tokenizer that it names is not downloaded.
    """
    try:
        text = json.dumps(read_step(step_dir).run)
    except DamagedError as error:
        raise no_checkpoint(step_dir, str(error)) from error
    record: dict[str, Any] = json.loads(in_folder(text, named_step(step_dir).parent.parent))
    model = record.get("model")
    if isinstance(model, dict) and str(model.get("hf_assets_path")).startswith(HUB):
        require_cached(model["hf_assets_path"])
    return record


def read_job_config(step_dir: Path, config_file: Path | None = None) -> Any:
    """Read the configuration of a checkpoint's run, with the defaults of what its record lacks.

    Args:
        step_dir: As for `read_run_config`.
        config_file: As for `read_run_config`.

    Raises:
        ConfigError: There is no readable configuration, or it names no corpus.
    """
    found = read_run_config(step_dir, config_file)
    if config_file is not None:
        return found
    record = read_record(step_dir)
    for section in ("training", "validation"):
        if not hasattr(getattr(found, section, None), "dataset"):
            want = "the complete record of a run, or --corpus"
            raise ConfigError(RUN_CONFIG, f"no {section}.dataset", want)
    return build_job_config([], record)


def find_step(folder: Path) -> Path:
    """Return the step of a run's dump folder that is resumed; any other folder as it is.

    Raises:
        ConfigError: The run has no complete checkpoint.
    """
    if not (folder / RUN_CONFIG).is_file():
        return folder
    try:
        name = read_json(folder / RUN_CONFIG).get("checkpoint", {}).get("folder", "checkpoint")
        fits = name and not os.path.isabs(name) and ".." not in Path(name).parts
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(str(folder / RUN_CONFIG), str(error), "the run's record") from error
    want = f"a folder within {folder}, or a step's folder"
    require(fits, "checkpoint.folder", name, want)
    newest = newest_step(folder / name)
    want = f"a run with a complete checkpoint in {folder / name}"
    require(newest >= 0, "CHECKPOINT", str(folder), want)
    return Path(step_folder(folder / name, newest))


def build_model_args(config: Any) -> LlamaArgs:
    """Build the model's arguments as the trainer does: the flavor, then the job's overrides.

    Returns:
        The model's arguments.

    Raises:
        ConfigError: The model or flavor is unknown, a section is missing, or an override is
            invalid.
    """
    try:
        name, flavor = config.model.name, config.model.flavor
        family = find_family(str(name))
        if family is None:
            known = one_of((family.model_name for family in FAMILIES.values()), name)
            raise ConfigError("model.name", name, f"{known}, or {ITS_MODULE}")
        flavors = FLAVORS[family.name]
        if flavor not in flavors:
            raise ConfigError("model.flavor", flavor, one_of(flavors, flavor))
        args = flavors[flavor]
        args.update_from_config(config)
    except AttributeError as error:
        raise ConfigError(RUN_CONFIG, str(error), "the complete record of a run") from error
    return args


def open_weights(step_dir: Path, args: LlamaArgs, assets_path: str = "") -> StoredWeights:
    """Verify a checkpoint of any number of ranks, without loading its weights.

    In a process group every rank calls it, and verifies its share of the files.

    Args:
        step_dir: Folder of a distributed checkpoint (DCP).
        args: The model's arguments.
        assets_path: Folder of the tokenizer to use with it, if any.

    Returns:
        The weights, which are read on demand.

    Raises:
        ConfigError: The folder is not a complete checkpoint, is damaged, or contains another model.
    """
    try:
        record, metadata = verified(step_dir), read_metadata(step_dir)
    except DamagedError as error:
        raise no_checkpoint(step_dir, str(error)) from error
    stored = metadata.state_dict_metadata
    check_depth(args, len(stored), "CHECKPOINT", step_dir)
    shapes = model_shapes(args)
    dtype = _check_stored(step_dir, stored, args, shapes)
    model = {**record.states.get("model", {}), **model_fingerprint(args)}
    if assets_path:
        model[TOKENIZER] = tokenizer_digest(assets_path)
    check_start(Start(str(step_dir)), record, {"model": model})
    return StoredWeights(args, step_dir, metadata, shapes, dtype)


def load_model(step_dir: Path, args: LlamaArgs, assets_path: str = "") -> LlamaModel:
    """Verify a checkpoint of any number of ranks and load its weights onto the CPU.

    The arguments are those of `open_weights`.

    Returns:
        The model in the checkpoint's dtype, in evaluation mode.

    Raises:
        ConfigError: The folder is not a complete checkpoint, is damaged, or contains another model.
    """
    stored = open_weights(step_dir, args, assets_path)
    model = empty_model(args).to(stored.dtype).to_empty(device="cpu")
    stored.fill(model.state_dict())
    return model.eval()


def load_for_inference(
    step_dir: Path,
    config_file: Path | None = None,
    device: str = "",
    check: Callable[[LlamaArgs], object] | None = None,
) -> tuple[LlamaModel, Any]:
    """Load a checkpoint's model onto a device, with the tokenizer of its run.

    On a CPU this process keeps its memory, see `titan.device.keep_freed_memory`.

    Args:
        step_dir: The checkpoint, ``<dump folder>/<checkpoint folder>/step-<n>``.
        config_file: A TOML to read instead of the run's saved configuration.
        device: Name of the device; by default cuda if there is one, else cpu.
        check: Called with the model's arguments before the weights are read; may raise.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        ConfigError: The checkpoint, tokenizer or device cannot be used.
    """
    # Imported late: it reads its arguments with this module.
    from torchtitan_lr.hf.exported import is_export, load_export

    config, args, tokenizer = read_for_inference(step_dir, config_file)
    if check is not None:
        check(args)
    device = find_device(device)
    if device == "cpu":
        keep_freed_memory()
    if is_export(step_dir):
        model = load_export(step_dir)
    else:
        model = load_model(step_dir, args, config.model.hf_assets_path)
    return model.to(device), tokenizer


def find_device(name: str) -> str:
    """Return the name of the device to compute on: by default cuda if there is one, else cpu.

    Raises:
        ConfigError: The device is not there, or has no numbers (``meta``).
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("--device", name, "a device of this machine, such as cpu") from error
    return name


def read_for_inference(
    step_dir: Path, config_file: Path | None = None
) -> tuple[Any, LlamaArgs, Any]:
    """Read what a checkpoint or an export says about its model, without the weights.

    Returns:
        The job's sections as attributes (an export has ``model`` alone), the model's arguments and
        the tokenizer.

    Raises:
        ConfigError: One of the files cannot be used.
    """
    from torchtitan_lr.hf.exported import is_export, read_export_args

    if is_export(step_dir):
        config: Any = SimpleNamespace(model=SimpleNamespace(hf_assets_path=str(step_dir)))
        args = read_export_args(step_dir)
    else:
        config = read_run_config(step_dir, config_file)
        args = build_model_args(config)
    return config, args, load_tokenizer(config, args)


def load_tokenizer(config: Any, args: LlamaArgs) -> Any:
    """Return the tokenizer of a run.

    Raises:
        ConfigError: No tokenizer is found, or it does not fit the model's vocabulary.
    """
    tokenizer = build_tokenizer(config)
    if vocabulary(tokenizer) > args.vocab_size:
        want = f"a tokenizer within the model's vocabulary of {args.vocab_size}"
        raise ConfigError("model.hf_assets_path", config.model.hf_assets_path, want)
    return tokenizer


def _check_stored(
    step_dir: Path, stored: dict[str, Any], args: LlamaArgs, expected: dict[str, tuple[int, ...]]
) -> torch.dtype:
    """Check names and shapes, since DCP ignores extra tensors, and return the dtype."""
    found = {
        name: tuple(value.size) if isinstance(value, TensorStorageMetadata) else None
        for name, value in stored.items()
        if name.split(".")[0] not in TRAINING_STATES
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = f"{args.model_family.model_name} with {name} of shape {expected.get(name)}"
            want = f"a checkpoint of {what}, not {found.get(name)}; is --config the run's?"
            raise ConfigError("CHECKPOINT", str(step_dir), want)
    dtype: torch.dtype = stored["tok_embeddings.weight"].properties.dtype
    want = f"weights in floating point, not {dtype}"
    require(dtype.is_floating_point, "CHECKPOINT", str(step_dir), want)
    return dtype
