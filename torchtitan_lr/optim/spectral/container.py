# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A spectral optimizer and AdamW in torchtitan's container of optimizers."""

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.adam import ShardAdamW
from torchtitan_lr.optim.container import NamedOptimizers, trained_parameters
from torchtitan_lr.optim.groups import ONE_GROUP, ParameterGroups, split
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.optim.spectral.selection import select_matrices
from torchtitan_lr.titan import logger


class SpectralOptimizers(NamedOptimizers):
    """`SpectralOptimizer` for the matrices of all model parts of a rank, AdamW for the rest.

    Gradients are those that FSDP2 or DDP leaves: `optim.gradients.StoredGradients`.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        config: ``[optimizer]``.
        groups: Other rates for some parameters.
    """

    def __init__(
        self, model_parts: list[nn.Module], config: Any, groups: ParameterGroups = ONE_GROUP
    ) -> None:
        self.model_parts = model_parts
        parameters = trained_parameters(*model_parts)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        rates = groups.rates(config, shapes)
        chosen = select_matrices(shapes, config.name)
        matrices = [(n, p) for n, p in parameters.items() if n in chosen.names]
        others = [(n, p) for n, p in parameters.items() if n not in chosen.names]
        optimizers: list[Optimizer] = []
        if matrices:  # a pipeline stage may have none
            spectral = SpectralOptimizer(
                split(matrices, rates),
                config.name,
                [(parameters[a], parameters[b]) for a, b in chosen.pairs],
                momentum=config.momentum,
                nesterov=config.nesterov,
            )
            optimizers.append(spectral)
            gathered = sum(bool(matrix.layout.rows) for matrix in spectral.matrices)
            logger.info("%s updates %d matrices of this rank", config.name, len(matrices))
            if gathered:
                weight = " and the weight" if spectral.rule.weight_grams else ""
                logger.info(
                    "%s gathers the momentum%s of %d matrices, whose rank (or shorter side) the "
                    "ranks split: more bytes per step than Gram matrices",
                    *(config.name, weight, gathered),
                )
        if others:
            optimizers.append(_adamw(split(others, rates), config))
        self.contain(optimizers, {"lr": config.lr})


def _adamw(groups: list[dict[str, Any]], config: Any) -> ShardAdamW:
    """Build AdamW for groups of named parameters, with its state."""
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
