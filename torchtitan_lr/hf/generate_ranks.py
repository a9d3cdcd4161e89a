# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Generation under torchrun: the ranks' settings, their part of the model."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lr.collectives import Ranks
from torchtitan_lr.config.build import config_class
from torchtitan_lr.config.parse import apply_overrides, split_arguments
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.hf.loading import load_for_inference, read_for_inference
from torchtitan_lr.hf.ranks import open_on_ranks
from torchtitan_lr.inference.decode import Choice
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.generation import generation_settings, sharded_choice
from torchtitan_lr.parallel.plans import apply_tensor_parallel
from torchtitan_lr.titan.device import keep_freed_memory

DEGREE = "parallelism.tensor_parallel_degree"

_ONE = {
    "parallelism.pipeline_parallel_degree": "the model as one pipeline stage",
    "parallelism.context_parallel_degree": "whole prompts on every rank",
    "parallelism.data_parallel_replicate_degree": "one replica",
    "parallelism.data_parallel_shard_degree": "weights that only tensor parallelism shards",
}
"""Degrees that must be 1, and what generation has instead."""


def read_parallelism(config: Any, overrides: Sequence[str], world: int) -> SimpleNamespace:
    """Return the ``tp_*`` keys of the run's record, as the command line overrides them.

    Args:
        config: The job's sections as attributes; ``parallelism`` may be missing.
        overrides: ``--parallelism.key=value``.
        world: Number of ranks.

    Returns:
        The keys as attributes.

    Raises:
        ConfigError: An override that generation has no use for, or a degree that is not the number
            of ranks.
    """
    section = getattr(config, "parallelism", SimpleNamespace())
    given: dict[str, Any] = {}
    apply_overrides(given, split_arguments(list(overrides)), config_class())
    for name, table in given.items():
        for key, value in table.items() if isinstance(table, dict) else [("", table)]:
            _check_override(f"{name}.{key}" if key else name, value, world)
    kept = {key: value for key, value in vars(section).items() if key.startswith("tp_")}
    return SimpleNamespace(**kept | given.get("parallelism", {}))


def _check_override(key: str, value: object, world: int) -> None:
    if key == DEGREE:
        fits, want = value == world, f"{world}, the number of ranks"
        if world == 1:
            want = f"1, or a start with torchrun --nproc_per_node={value}"
    elif key in _ONE:
        fits = value in (1, -1)
        want = f"1: generation has {_ONE[key]}, {DEGREE} splits it over ranks"
    else:
        fits = key.startswith("parallelism.tp_")
        want = f"{DEGREE} or a key parallelism.tp_*: generation has no other"
    require(fits, key, value, want)


def load_on_ranks(
    step_dir: Path,
    config_file: Path | None,
    device: str,
    overrides: Sequence[str],
) -> tuple[LlamaModel, Any, Choice | None]:
    """Load this rank's part of a model; the process group is started if there are several ranks.

    Returns:
        The model, the tokenizer, and what draws its tokens, if ranks hold parts of the logits.

    Raises:
        ConfigError: The checkpoint, tokenizer, device or layout cannot be used.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config, args, tokenizer = read_for_inference(step_dir, config_file)
    settings = generation_settings(read_parallelism(config, overrides, world), args, world)
    if world == 1:
        model, tokenizer = load_for_inference(step_dir, config_file, device)
        return model, tokenizer, None
    mesh = _start(device)
    dtype, fill = open_on_ranks(step_dir, args, config.model.hf_assets_path)
    model = empty_model(args).to(dtype)
    apply_tensor_parallel(model, mesh, settings)
    model.to_empty(device=mesh.device_type)
    fill([model])
    return model.eval(), tokenizer, partial(sharded_choice, Ranks.of(mesh))


def _start(device: str) -> DeviceMesh:
    """Start the process group and return the mesh of all ranks."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = device.split(":")[0] or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            want = f"cpu, or at most {torch.cuda.device_count()} ranks on this machine"
            raise ConfigError("--device", device or kind, want)
        torch.cuda.set_device(local_rank)
    elif kind != "cpu":
        raise ConfigError("--device", device, "cpu or cuda for several ranks")
    else:
        keep_freed_memory()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))
