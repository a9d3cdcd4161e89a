# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run is: its configuration with all open choices decided, and its description."""

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist
from torch import nn

from torchtitan_lr.console.log import console
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.plans import tp_settings
from torchtitan_lr.titan.base import JobConfig, ParallelDims, drop_marker

_PACKAGES = ("torchtitan_lr", "torchtitan", "torch")


def resolved_config(
    job_config: JobConfig, dims: ParallelDims, model_args: Any = None
) -> dict[str, Any]:
    """Return a run's configuration without ``-1`` and ``auto``.

    Args:
        job_config: The merged TOML file and command line.
        dims: The parallel degrees.
        model_args: The model's arguments, if they are known.

    Returns:
        The sections of the TOML, and two more: ``model_args``, and ``environment`` with the number
        of ranks and the versions of the packages.
    """
    config: dict[str, Any] = job_config.to_dict()
    config["parallelism"] |= {
        "data_parallel_replicate_degree": dims.dp_replicate,
        "data_parallel_shard_degree": dims.dp_shard,
    }
    config["training"]["global_batch_size"] = global_batch_size(job_config, dims)
    if isinstance(model_args, LlamaArgs):
        config["model_args"] = drop_marker(asdict(model_args))
        if dims.tp > 1:
            settings = asdict(tp_settings(job_config, model_args, dims.tp))
            known = config["parallelism"].keys()
            resolved = {f"tp_{key}": value for key, value in settings.items()}
            config["parallelism"] |= {k: v for k, v in resolved.items() if k in known}
    config["environment"] = {"ranks": dims.world_size, "python": platform.python_version()}
    config["environment"] |= {name: _version(name) for name in _PACKAGES}
    return config


def global_batch_size(job_config: JobConfig, dims: ParallelDims) -> int:
    """Return the sequences per step of all ranks together."""
    training = job_config.training
    if training.global_batch_size > 0:
        return int(training.global_batch_size)
    return int(training.local_batch_size * dims.dp_replicate * dims.dp_shard)


def layout(dims: ParallelDims) -> str:
    """Return the parallel degrees in words, such as ``4 ranks (dp_shard 2, tp 2)``."""
    degrees = {name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    split = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    if dims.world_size == 1:
        return "1 rank"
    return f"{dims.world_size} ranks ({split})"


def report_start(
    job_config: JobConfig, dims: ParallelDims, model_parts: list[nn.Module], step: int
) -> None:
    """Print the first lines of the console: the model, the layout, the batch, the first step.

    Call it on every rank; the stages of a pipeline add up their parameters.
    """
    counts = [sum(p.numel() for part in model_parts for p in part.parameters())]
    stages = dims.get_optional_mesh("pp")
    if stages is not None:
        own, group = counts[0], stages.get_group()
        counts = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, own, group=group)
    model, training = job_config.model, job_config.training
    args, rank = model_parts[0].model_args, ""
    if isinstance(args, LlamaArgs) and args.low_rank:  # low_rank.rank = 0 is the flavor's
        ranks = dict.fromkeys((args.rank_attention, args.rank_ffn))
        rank = f", rank {' and '.join(map(str, ranks))}"
    console.info(
        f"{model.name} {model.flavor}: {sum(counts):,} parameters{rank}, on {layout(dims)}, "
        f"{global_batch_size(job_config, dims):,} sequences of {training.seq_len:,} tokens per step"
    )
    console.info(f"Training starts at step {step + 1}")


def title_of(job_config: JobConfig, dims: ParallelDims) -> str:
    """Return the title of a run's curve."""
    model = job_config.model
    what = job_config.job.description or f"{model.name} {model.flavor}"
    return f"{what}, {layout(dims)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source
        return "unknown"


def report_stop(job_config: JobConfig, stopped_by: str, step: int, saved: str | None) -> None:
    """Log that a run ended early, and how it can be resumed.

    Args:
        job_config: The run's configuration.
        stopped_by: Name of the signal.
        step: The last step.
        saved: The newest checkpoint, None without one.
    """
    how = "run the same command again to resume" if saved else "checkpointing is off"
    if saved and job_config.checkpoint.load_step != -1:
        how = "run the command again without checkpoint.load_step to resume"
    total = job_config.training.steps
    what = "Stopped by %s after step %d of %d, checkpoint %s: %s"
    console.info(what, stopped_by, step, total, saved, how)
