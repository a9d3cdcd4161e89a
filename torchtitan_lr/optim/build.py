# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Build the optimizer from ``[optimizer]``."""

from typing import Any, cast

import torch.distributed as dist
from torch import nn

from torchtitan_lr.config.methods import TSR
from torchtitan_lr.optim.shard_adam import step_on_shards
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer
from torchtitan_lr.titan.components import build_optimizers as titan_build_optimizers


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
) -> OptimizersContainer:
    """Build a container of optimizers, one per model part: torchtitan's, or TSR-Adam's.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        optimizer_config: ``[optimizer]``.
        parallel_dims: Degrees and meshes.
    """
    if optimizer_config.name == TSR:
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        return TSROptimizers(
            model_parts,
            TSRSettings.from_config(optimizer_config),
            {name: getattr(optimizer_config, name) for name in names},
            _group(parallel_dims, "dp_replicate"),
            _group(parallel_dims, "pp"),
        )
    optimizers = titan_build_optimizers(model_parts, optimizer_config, parallel_dims)
    for optimizer in optimizers:
        step_on_shards(optimizer)
    return optimizers


def _group(parallel_dims: ParallelDims, name: str) -> dist.ProcessGroup | None:
    mesh: Any = parallel_dims.get_optional_mesh(name)
    return None if mesh is None else cast(dist.ProcessGroup, mesh.get_group())
