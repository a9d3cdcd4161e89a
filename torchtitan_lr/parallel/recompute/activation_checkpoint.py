# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Registers the package's modes of activation checkpointing, and applies a run's mode."""

from torch import nn

from torchtitan_lr.parallel.recompute.low_rank_checkpoint import LowRankCheckpointing
from torchtitan_lr.parallel.recompute.mode import (
    MODES,
    CheckpointingMode,
    compiles_model,
    register_mode,
)
from torchtitan_lr.parallel.recompute.titan_modes import (
    Full,
    MemoryBudget,
    NoCheckpointing,
    Selective,
)
from torchtitan_lr.titan.base import JobConfig

__all__ = [
    "MODES",
    "CheckpointingMode",
    "apply_activation_checkpoint",
    "compiles_model",
    "register_mode",
]


def apply_activation_checkpoint(model: nn.Module, job_config: JobConfig) -> None:
    """Wrap decoder blocks in the mode of ``[activation_checkpoint]``.

    Args:
        model: After tensor parallelism; the whole model or a pipeline stage of it.
        job_config: The run's configuration.
    """
    MODES[job_config.activation_checkpoint.mode].apply(model, job_config)


for _mode in (NoCheckpointing(), Selective(), Full(), LowRankCheckpointing(), MemoryBudget()):
    register_mode(_mode)
