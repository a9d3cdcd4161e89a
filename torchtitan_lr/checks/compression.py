# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of ``[grad_compression]`` before any rank starts."""

import math
from typing import Any

from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.optim.entries import ENTRIES


def check_grad_compression(config: Any, world_size: int, device_type: str) -> None:
    """Check the layout, that the sketch peels, and that some tensor is selected."""
    section = config.grad_compression
    if section.codec == "none":
        return
    parallelism = config.parallelism
    replicate = parallelism.data_parallel_replicate_degree
    shard = world_size // parallelism.tensor_parallel_degree // replicate
    want = ""
    if parallelism.pipeline_parallel_degree > 1:
        want = "'none' with pipeline_parallel_degree > 1"
    elif replicate > 1 and shard == 1:
        want = "'none' unless FSDP shards: parallelism.data_parallel_shard_degree is 1 here"
    elif ENTRIES[config.optimizer.name].sums_replicas:
        want = f"'none' with optimizer.name = {config.optimizer.name!r}, which reduces by itself"
    require(not want, "grad_compression.codec", section.codec, want)
    ranks = replicate if replicate > 1 else max(1, shard)
    # Imported late because it imports torch.
    from torchtitan_lr.compression.settings import compression_settings, is_compressed

    settings = compression_settings(config, ranks)
    args = llama_args(config)
    if args is None:  # another package's model: the ranks check it
        return
    sizes = {name: math.prod(shape) for name, shape in model_shapes(args).items()}
    if not any(is_compressed(name, size, settings) for name, size in sizes.items()):
        want = "the size of some tensor of this model, or less"
        raise ConfigError("grad_compression.min_size", section.min_size, want)
    if section.codec == "sketch" and ranks > 1:
        # Imported late because they import torch, models and plans.
        from torchtitan_lr.costs.described_run import read_run
        from torchtitan_lr.costs.step_traffic import exchanged_units

        units = exchanged_units(read_run(config, world_size))
        want = "'sparse' or 'none': every unit of this selection is too small for a sketch to peel"
        fits = any(unit.compressed for _, unit in units)
        require(fits, "grad_compression.codec", "sketch", want)
