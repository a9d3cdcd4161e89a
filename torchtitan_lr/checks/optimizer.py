# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of TSR-Adam's settings against the model and the layout."""

from typing import Any

from torchtitan_lr.config.methods import TSR
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import llama_args, model_shapes


def check_tsr(config: Any, world_size: int, device_type: str) -> None:
    """Check TSR-Adam's ranks against the model's shapes."""
    optimizer = config.optimizer
    if optimizer.name != TSR:
        return
    if config.training.enable_cpu_offload:
        raise ConfigError("training.enable_cpu_offload", True, "false with TSRAdam")

    from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

    args = llama_args(config)
    if args is not None:  # else another package's model: the ranks check it
        plan_matrices(model_shapes(args), TSRSettings.from_config(optimizer))
