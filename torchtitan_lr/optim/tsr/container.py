# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam in torchtitan's container of optimizers."""

from typing import Any

import torch.distributed as dist
from torch import nn

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.groups import ONE_GROUP, ParameterGroups
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.components import OptimizersContainer, init_optimizer_container


class TSROptimizers(OptimizersContainer):
    """One `TSRAdam` for all model parts of a rank, with one exchange for all their cores.

    The state loads in any layout: it is saved by the names of parameters, as torchtitan's
    containers save theirs.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        settings: The settings.
        defaults: ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay``.
        replicas: Ranks with equal parameters and different data.
        stages: Pipeline ranks.
        groups: Groups of parameters with rates of their own.

    Attributes:
        gradients: The optimizer, which is also the `Gradients` of a step.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        settings: TSRSettings,
        defaults: dict[str, float],
        replicas: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
        groups: ParameterGroups = ONE_GROUP,
    ) -> None:
        self.model_parts = model_parts
        parts = []
        for part in model_parts:
            trained = [(clean_name(n), p) for n, p in part.named_parameters() if p.requires_grad]
            parts += groups.split(trained, defaults["lr"], defaults["weight_decay"])
        self.gradients = TSRAdam(
            parts, settings, **defaults, group=replicas, stages=stages, average=False
        )
        self.optimizers = [self.gradients]
        parameters = [p for group in self.gradients.param_groups for p in group["params"]]
        init_optimizer_container(self, parameters, defaults)
        compressed = sum(len(stack.parameters) for stack in self.gradients.stacks)
        logger.info("TSR-Adam compresses %d matrices of this rank", compressed)
        if replicas is None and "fsdp" in self.gradients.groups.sharding:
            logger.info(
                "TSR-Adam without replicas: FSDP's reduce-scatter stays dense; only optimizer "
                "memory is saved. Set parallelism.data_parallel_replicate_degree to save "
                "communication"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as ``state.NAME.KEY`` and ``param_groups.NAME.KEY``."""
        # Upstream's has one optimizer per model part.
        found = {}
        for group in self.gradients.param_groups:
            hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, value in self.gradients.state[parameter].items():
                    found[f"state.{name}.{key}"] = value
                for key, value in hyper.items():
                    found[f"param_groups.{name}.{key}"] = value
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the optimizer's tensors; hyperparameters stay the configured ones."""
        for name, own in self.state_dict().items():
            if name.startswith("state."):
                local_part(own).copy_(local_part(state_dict[name]))
