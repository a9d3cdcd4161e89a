# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run is: its configuration with all open choices decided, and its description."""

import platform
from dataclasses import asdict
from importlib.metadata import distributions
from typing import Any

import torch.distributed as dist
from torch import nn

from torchtitan_lr.checkpoints.run_record import global_batch_size
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
    config["training"]["global_batch_size"] = global_batch_size(job_config, dims.world_size)
    if isinstance(model_args, LlamaArgs):
        config["model_args"] = drop_marker(asdict(model_args))
        if dims.tp > 1:
            settings = asdict(tp_settings(job_config, model_args, dims.tp))
            known = config["parallelism"].keys()
            resolved = {f"tp_{key}": value for key, value in settings.items()}
            config["parallelism"] |= {k: v for k, v in resolved.items() if k in known}
    config["environment"] = {"ranks": dims.world_size, "python": platform.python_version()}
    for name in _PACKAGES:  # the package itself may run from its source
        found = next(iter(distributions(name=name)), None)
        config["environment"][name] = found.version if found else "unknown"
    return config


def layout(dims: ParallelDims) -> str:
    """Return the parallel degrees in words, such as ``4 ranks (dp_shard 2, tp 2)``."""
    names = ("dp_replicate", "dp_shard", "tp", "pp")
    degrees = ((name, getattr(dims, name)) for name in names)
    split = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    return "1 rank" if dims.world_size == 1 else f"{dims.world_size} ranks ({split})"


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
        f"{global_batch_size(job_config, dims.world_size):,} sequences of {training.seq_len:,} "
        "tokens per step"
    )
    console.info(f"Training starts at step {step + 1}")
