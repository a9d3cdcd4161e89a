# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Adam and AdamW on shards."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.container import trained_parameters
from torchtitan_lr.optim.groups import ParameterGroups, regroup, split
from torchtitan_lr.optim.resume import keep_hyperparameters
from torchtitan_lr.titan import components
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer


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


_ON_SHARDS = {torch.optim.Adam: ShardAdam, torch.optim.AdamW: ShardAdamW}


def build_adam(
    model_parts: list[nn.Module], config: OptimizerConfig, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """Build torchtitan's container of Adam or AdamW, with the groups of a configuration."""
    optimizers = components.build_optimizers(model_parts, config, parallel_dims)
    named = trained_parameters(*model_parts)
    shapes = {name: parameter.shape for name, parameter in named.items()}
    rates = ParameterGroups.from_config(config).rates(config, shapes)
    for part, optimizer in zip(model_parts, optimizers, strict=True):
        regroup(optimizer, split(trained_parameters(part).items(), rates))
        optimizer.__class__ = _ON_SHARDS[type(optimizer)]
        optimizer.register_load_state_dict_pre_hook(keep_hyperparameters)
    return optimizers


def adamw_with_state(groups: list[dict[str, Any]], config: OptimizerConfig) -> ShardAdamW:
    """Build AdamW for groups of named parameters; its state is there before the first step."""
    how = config.implementation
    optimizer = ShardAdamW(
        groups,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=how == "fused",
        foreach=how == "foreach",
    )
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        # As torch creates it in the first step: a state to load needs tensors.
        device = local_part(parameter).device if how == "fused" else "cpu"
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer
