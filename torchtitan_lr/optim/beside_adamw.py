# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An optimizer of matrices beside AdamW, which updates all other parameters."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan_lr.optim.adam import adamw_with_state
from torchtitan_lr.optim.container import NamedOptimizers, trained_parameters
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.groups import ParameterGroups, split
from torchtitan_lr.optim.spectral.selection import select_matrices

OfMatrices = Callable[[list[dict[str, Any]], list[tuple[Tensor, Tensor]]], Optimizer]
"""Builds an optimizer from torch's groups of its named matrices, and the pairs A, B among them."""


class BesideAdamW(NamedOptimizers):
    """An optimizer for the matrices that its entry says, of all model parts, and AdamW.

    Gradients are those that FSDP2 or DDP leaves: `optim.gradients.StoredGradients`.
    """

    def __init__(self, model_parts: list[nn.Module], config: Any, of_matrices: OfMatrices) -> None:
        self.model_parts = model_parts
        parameters = trained_parameters(*model_parts)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        rates = ParameterGroups.from_config(config).rates(config, shapes)
        chosen = select_matrices(shapes, ENTRIES[config.name].updates)
        matrices = [(n, p) for n, p in parameters.items() if n in chosen.names]
        others = [(n, p) for n, p in parameters.items() if n not in chosen.names]
        optimizers: list[Optimizer] = []
        if matrices:  # a pipeline stage may have none
            pairs = [(parameters[a], parameters[b]) for a, b in chosen.pairs]
            optimizers.append(of_matrices(split(matrices, rates), pairs))
        if others:
            optimizers.append(adamw_with_state(split(others, rates), config))
        self.contain(optimizers, {"lr": config.lr})
