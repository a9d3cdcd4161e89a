# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Build the optimizer from ``[optimizer]``; Adam and AdamW that update this rank's shards."""

from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.config.schema import TSR
from torchtitan_lr.optim.selection import TSRSettings
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
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
        meshes = [parallel_dims.get_optional_mesh(name) for name in ("dp_replicate", "pp")]
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        return TSROptimizers(
            model_parts,
            TSRSettings.from_config(optimizer_config),
            {name: getattr(optimizer_config, name) for name in names},
            *(None if mesh is None else mesh.get_group() for mesh in meshes),
        )
    optimizers = titan_build_optimizers(model_parts, optimizer_config, parallel_dims)
    for optimizer in optimizers:
        # Other optimizers than Adam and AdamW are left alone.
        optimizer.__class__ = ON_SHARDS.get(type(optimizer), type(optimizer))
    return optimizers


class ShardAdam(torch.optim.Adam):
    """`torch.optim.Adam` that updates local shards; its state stays DTensors, for checkpoints.

    Adam is elementwise, so each shard can be updated alone. Torch's own step passes lists of
    DTensors to the dispatcher, which looks up the placements of every parameter on the host.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # Torch collects parameters, gradients and states here, then updates the collected tensors.
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


class ShardAdamW(ShardAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local shards."""


ON_SHARDS = {torch.optim.Adam: ShardAdam, torch.optim.AdamW: ShardAdamW}
"""The shard-local subclass of each of torch's optimizers."""
