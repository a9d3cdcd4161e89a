# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A spectral optimizer and AdamW in torchtitan's container of optimizers."""

from typing import Any

from torch import Tensor, nn

from torchtitan_lr.optim.beside_adamw import BesideAdamW
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims


def build_spectral(
    model_parts: list[nn.Module], config: OptimizerConfig, parallel_dims: ParallelDims
) -> BesideAdamW:
    """Build the optimizer of the rule that the configuration names, with AdamW for the rest."""

    def of_matrices(
        groups: list[dict[str, Any]], pairs: list[tuple[Tensor, Tensor]]
    ) -> SpectralOptimizer:
        options: Any = config  # whose own keys are not torchtitan's
        optimizer = SpectralOptimizer(
            groups, config.name, pairs, momentum=options.momentum, nesterov=options.nesterov
        )
        logger.info("%s updates %d matrices of this rank", config.name, len(optimizer.matrices))
        if gathered := sum(bool(matrix.layout.rows) for matrix in optimizer.matrices):
            weight = " and the weight" if optimizer.rule.weight_grams else ""
            logger.info(
                "%s gathers the momentum%s of %d matrices, whose rank (or shorter side) the "
                "ranks split: more bytes per step than Gram matrices",
                *(config.name, weight, gathered),
            )
        return optimizer

    return BesideAdamW(model_parts, config, of_matrices)
