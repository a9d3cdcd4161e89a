# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A trained model on the ranks of torchrun, in any layout that training has, without gradients."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchtitan_lr.training.register  # noqa: F401  (registers the families)
from torchtitan_lr.checkpoints.folders import is_dcp
from torchtitan_lr.checkpoints.manifest import damage_of
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.checks.support import check_context
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.exported import (
    export_dtype,
    fill_from_export,
    is_export,
    read_export_args,
)
from torchtitan_lr.hf.loading import SECTIONS, build_model_args, open_weights, read_record
from torchtitan_lr.hf.weights import no_checkpoint
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import summed_loss
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, ParallelDims, dist_utils, set_default_dtype
from torchtitan_lr.titan.components import ModelWrapper
from torchtitan_lr.titan.specs import get_train_spec
from torchtitan_lr.training.validate import sum_over_ranks

_OVERRIDES = ("parallelism", "comm")
"""Sections that the command line may change."""

_FLAVOR = "of the export"

Batches = Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
"""Inputs and labels."""


def started_by_torchrun() -> bool:
    """Return whether torchrun, or a launcher like it, started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def data_share(parallel_dims: ParallelDims) -> tuple[int, int]:
    """Return the number of data-parallel ranks, and this rank's place among them."""
    if not parallel_dims.dp_enabled:
        return 1, 0
    mesh = parallel_dims.get_mesh("batch")
    return mesh.size(), mesh.get_local_rank()


def build_config(
    checkpoint: Path,
    config_file: Path | None,
    overrides: list[str],
    world_size: int,
    device_type: str,
    seq_len: int | None = 0,
) -> Any:
    """Build and check the configuration of a model on several ranks; nothing is communicated.

    Layout, model and corpora are those of the run, unless an override changes the layout. What only
    training needs (optimizer, recomputation, compilation, compression) is left at its default.

    Args:
        checkpoint: A checkpoint of a run, or an export.
        config_file: A TOML to read instead of the run's record.
        overrides: Arguments ``--parallelism.key=value``.
        world_size: Number of ranks.
        device_type: ``cpu``, ``cuda`` or ``xpu``.
        seq_len: Length of the sequences; 0 for the trained window, None for those of the run's
            validation.

    Returns:
        torchtitan's JobConfig.

    Raises:
        ConfigError: The model does not exist, or does not fit the ranks.
    """
    check_overrides(overrides)
    if is_export(checkpoint):
        record = _record_of_export(checkpoint)
    elif config_file is not None:
        record = build_job_config([f"--job.config_file={config_file}"]).to_dict()
    else:
        record = read_record(checkpoint)
    if not (is_export(checkpoint) or is_dcp(checkpoint)):
        raise no_checkpoint(checkpoint, "no table of contents")
    kept = {name: record[name] for name in SECTIONS if name in record}
    config = build_job_config(overrides, kept)
    _without_training(config, seq_len)
    build_model_args(config)  # refuses another package's model
    check_job_config(config, world_size, device_type, on_paper=True)
    return config


def check_overrides(overrides: list[str]) -> None:
    """Raise for an override that would not change the layout.

    Raises:
        ConfigError: Another section.
    """
    for override in overrides:
        key = override.removeprefix("--").partition("=")[0]
        if key.partition(".")[0] not in _OVERRIDES:
            want = "--parallelism.key=value: the checkpoint's run sets everything else"
            raise ConfigError(key, override.partition("=")[2], want)


def _record_of_export(folder: Path) -> dict[str, Any]:
    """Return the record of a run with an export's model, as a flavor of its family."""
    args = read_export_args(folder)
    FLAVORS[args.family][_FLAVOR] = args
    model = {"name": args.model_family.model_name, "flavor": _FLAVOR}
    return {
        "model": model | {"hf_assets_path": str(folder)},
        "training": {"seq_len": args.max_seq_len},
        "low_rank": {"lax_gate": args.lax_gate},
        "caat": {"lanes": args.lanes, "sync_fraction": args.sync_fraction},
    }


def _without_training(config: Any, seq_len: int | None) -> None:
    """Replace what only training needs."""
    training, section = config.training, config.parallelism
    # A pipeline's schedule of training is built, but only its stages are used.
    size = section.pipeline_parallel_microbatch_size
    training.local_batch_size = 2 * max(1, size) * max(1, section.pipeline_parallel_degree)
    training.global_batch_size = -1
    training.enable_cpu_offload = False
    config.activation_checkpoint.mode = "none"
    config.validation.enable = True
    config.comm.trace_buf_size = 0  # else a folder for traces is made
    if seq_len is not None:
        check_window(seq_len, training.seq_len)
        config.validation.seq_len = seq_len or training.seq_len


def check_window(seq_len: int, longest: int) -> None:
    """Raise for sequences that are longer than the trained window.

    Raises:
        ConfigError: The model has fewer rotary positions.
    """
    if seq_len > longest:
        raise ConfigError("--seq_len", seq_len, f"at most the trained window {longest}")


def start_group(config: Any) -> ParallelDims:
    """Join the process group of all ranks, and return degrees and meshes."""
    level = logger.level
    logger.setLevel("ERROR")  # upstream warns that it sets variables
    world_size = dist_utils.init_distributed(config.comm)
    logger.setLevel(level)
    section = config.parallelism
    return ParallelDims(
        dp_shard=section.data_parallel_shard_degree,
        dp_replicate=section.data_parallel_replicate_degree,
        cp=section.context_parallel_degree,
        tp=section.tensor_parallel_degree,
        pp=section.pipeline_parallel_degree,
        ep=section.expert_parallel_degree,
        etp=section.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def load_on_ranks(
    checkpoint: Path,
    config: Any,
    parallel_dims: ParallelDims,
    device: torch.device,
    allow_unverified: bool = False,
) -> Callable[[Batches], tuple[float, int]]:
    """Build this rank's part of the model and read its shards of the weights.

    Args:
        checkpoint: A checkpoint of any number of ranks, or an export.
        config: Result of `build_config`.
        parallel_dims: Result of `start_group`.
        device: This rank's device.
        allow_unverified: As ``checkpoint.allow_unverified``.

    Returns:
        A function that gives the loss summed over the tokens of all ranks, in nats, and their
        number, of this rank's share of the batches; every rank has as many of equal sizes.

    Raises:
        ConfigError: The files are damaged or hold another model.
    """
    args = build_model_args(config)
    assets = config.model.hf_assets_path
    dtype, fill = open_on_ranks(checkpoint, args, assets, allow_unverified)
    # The wrappers compute in the weights' own precision, as one process does.
    names = {value: name for name, value in TORCH_DTYPE_MAP.items()}
    if dtype not in names:
        want = f"weights in one of {', '.join(TORCH_DTYPE_MAP)} on several ranks"
        raise ConfigError("CHECKPOINT", str(dtype).removeprefix("torch."), want)
    config.training.dtype = config.training.mixed_precision_param = names[dtype]
    check_context(config, parallel_dims.world_size, device.type)  # of kernels in this precision
    parts, pipeline = _build_parts(config, args, parallel_dims, device, dtype)
    fill(parts)
    loss_parallel = parallel_dims.tp_enabled and not config.parallelism.disable_loss_parallel
    context = dist_utils.get_train_context(loss_parallel)

    def total_loss(batches: Batches) -> tuple[float, int]:
        with context():
            loss, tokens = sum_over_ranks(parts, batches, summed_loss, pipeline, parallel_dims)
        return loss, round(tokens)

    return total_loss


def open_on_ranks(
    checkpoint: Path, args: LlamaArgs, assets_path: str, allow_unverified: bool = False
) -> tuple[torch.dtype, Callable[[list[nn.Module]], None]]:
    """Verify a checkpoint or an export on all ranks, without loading its weights.

    Returns:
        The weights' precision, and what reads them into this rank's parts of the model: every rank
        calls it and reads its own shards. It raises as this function does.

    Raises:
        ConfigError: The checkpoint is damaged, or contains another model.
    """
    if is_export(checkpoint):
        dtype = export_dtype(checkpoint)
        return dtype, lambda parts: fill_from_export(checkpoint, ModelWrapper(parts))
    stored = open_weights(checkpoint, args, assets_path, damage_of, allow_unverified)

    def fill(parts: list[nn.Module]) -> None:
        wrapper = ModelWrapper(parts)
        state = wrapper.state_dict()
        stored.fill(state, no_dist=False)
        wrapper.load_state_dict(state)

    return stored.dtype, fill


def _build_parts(
    config: Any,
    args: LlamaArgs,
    parallel_dims: ParallelDims,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[nn.Module], Pipeline | None]:
    """Split an empty model as training does."""
    spec = get_train_spec(config.model.name)
    with torch.device("meta"), set_default_dtype(dtype):
        model = spec.model_cls(args)
    pipeline = None
    if parallel_dims.pp_enabled:
        split = partial(spec.pipelining_fn, model, parallel_dims, config, device, args)
        pipeline, parts, _, _ = split(spec.parallelize_fn, summed_loss)
    else:
        parts = [spec.parallelize_fn(model, parallel_dims, config)]
    for part in parts:
        part.to_empty(device=device)
    return parts, pipeline
