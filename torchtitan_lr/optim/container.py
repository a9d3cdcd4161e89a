# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Torchtitan's container of optimizers, for optimizers that span all model parts of a rank."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.titan.components import OptimizersContainer, init_optimizer_container

REPLICAS_WIRE: WeakKeyDictionary[nn.Module, torch.dtype] = WeakKeyDictionary()
"""Dtype in which an optimizer sums a model part's gradients over the replicas, if not their own.

torchtitan builds optimizers from model parts and ``[optimizer]``, without ``[training]``.
"""


class NamedOptimizers(OptimizersContainer):
    """Optimizers whose groups name their parameters, and whose state exists from the start.

    The state is saved by the names of parameters, so that it loads in any layout.
    """

    def contain(self, optimizers: Sequence[Optimizer], defaults: dict[str, Any]) -> None:
        """Take optimizers without common parameters; called last, with ``model_parts`` set."""
        self.optimizers = list(optimizers)
        parameters: list[Tensor] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters += group["params"]
        init_optimizer_container(self, parameters, defaults)

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters as ``state.NAME.KEY`` and ``param_groups.NAME.KEY``."""
        found = {}
        for optimizer in self.optimizers:
            own = optimizer.state_dict()  # its method may have to settle a rejected step
            for group in own["param_groups"]:
                hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                for name, index in zip(group["param_names"], group["params"], strict=True):
                    for key, value in own["state"].get(index, {}).items():
                        found[f"state.{name}.{key}"] = value
                    for key, value in hyper.items():
                        found[f"param_groups.{name}.{key}"] = value
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the optimizers' tensors; hyperparameters stay the configured ones."""
        for name, own in self.state_dict().items():
            if name.startswith("state."):
                local_part(own).copy_(local_part(state_dict[name]))


def trained_parameters(*model_parts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of model parts that are trained, by their names on one device."""
    found: dict[str, Tensor] = {}
    for part in model_parts:
        found |= {clean_name(n): p for n, p in part.named_parameters() if p.requires_grad}
    return found
