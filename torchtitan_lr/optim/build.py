# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Building the optimizer from ``[optimizer]``."""

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as titan_build_optimizers
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
) -> OptimizersContainer:
    """Build torchtitan's container of Adam or AdamW optimizers, one per model part.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        optimizer_config: ``[optimizer]``.
        parallel_dims: Degrees and meshes.
    """
    return titan_build_optimizers(model_parts, optimizer_config, parallel_dims)
