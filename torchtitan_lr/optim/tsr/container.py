# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam in torchtitan's container of optimizers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lr.optim.container import REPLICAS_WIRE, NamedOptimizers, trained_parameters
from torchtitan_lr.optim.groups import ParameterGroups, Rates, split
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims


class TSROptimizers(NamedOptimizers):
    """One `TSRAdam` for all model parts of a rank, with one exchange for all their cores.

    It is also the `Gradients` of a step, ``gradients``. Without ``rates``, of parameters by name,
    ``defaults`` has them.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        settings: TSRSettings,
        defaults: dict[str, float],
        replicas: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
        rates: Mapping[str, Rates] | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.model_parts = model_parts
        parts: list[dict[str, Any]] = []
        for part in model_parts:
            named = list(trained_parameters(part).items())
            parts += split(named, rates) if rates else [{"params": named}]
        self.gradients = TSRAdam(
            parts,
            settings,
            **defaults,
            group=replicas,
            stages=stages,
            average=False,
            wire_dtype=wire_dtype,
            order=list(trained_parameters(*model_parts).values()),
        )
        self.contain([self.gradients], defaults)
        compressed = sum(len(stack.parameters) for stack in self.gradients.stacks)
        logger.info("TSR-Adam compresses %d matrices of this rank", compressed)
        if replicas is None and "fsdp" in self.gradients.groups.sharding:
            logger.info(
                "TSR-Adam without replicas: FSDP's reduce-scatter stays dense; only optimizer "
                "memory is saved. Set parallelism.data_parallel_replicate_degree to save "
                "communication"
            )


def build_tsr(
    model_parts: list[nn.Module], config: OptimizerConfig, parallel_dims: ParallelDims
) -> TSROptimizers:
    """Build TSR-Adam for the replicas and pipeline stages of a mesh."""
    named = trained_parameters(*model_parts)
    shapes = {name: parameter.shape for name, parameter in named.items()}
    meshes = [parallel_dims.get_optional_mesh(name) for name in ("dp_replicate", "pp")]
    replicas, stages = (None if mesh is None else mesh.get_group() for mesh in meshes)
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    return TSROptimizers(
        model_parts,
        TSRSettings.from_config(config),
        defaults={name: getattr(config, name) for name in names},
        replicas=replicas,
        stages=stages,
        rates=ParameterGroups.from_config(config).rates(config, shapes),
        wire_dtype=REPLICAS_WIRE.get(model_parts[0]),
    )
