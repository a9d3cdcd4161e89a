# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of TSR-Adam's settings against the model and the layout."""

import math
from typing import Any

from torchtitan_lr.config.methods import TSR
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import llama_args, model_shapes


def check_tsr(config: Any, world_size: int, device_type: str) -> None:
    """Check the ranges of ``tsr_*``, then ranks against the model's shapes."""
    optimizer = config.optimizer
    if optimizer.name != TSR:
        return
    _check_ranges(optimizer)
    if config.training.enable_cpu_offload:
        raise ConfigError("training.enable_cpu_offload", True, "false with TSRAdam")

    from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

    args = llama_args(config)
    if args is not None:  # else another package's model: the ranks check it
        plan_matrices(model_shapes(args), TSRSettings.from_config(optimizer))


def _check_ranges(optimizer: Any) -> None:
    least = {
        "tsr_rank": 1,
        "tsr_refresh_interval": 1,
        "tsr_embedding_refresh_interval": 1,
        "tsr_overlap_buckets": 1,
        "tsr_oversampling": 0,
        "tsr_power_iterations": 0,
        "tsr_vocabulary_power_iterations": -1,
        "tsr_embedding_rank": 0,
    }
    for name, bound in least.items():
        value = getattr(optimizer, name)
        if value < bound:
            want = f"an integer of at least {bound}"
            if name == "tsr_embedding_rank":
                want = "a rank, or 0 to leave the embedding dense"
            if name == "tsr_vocabulary_power_iterations":
                want = "a number of iterations, or -1 for tsr_power_iterations"
            raise ConfigError(f"optimizer.{name}", value, want)
    scale = optimizer.tsr_scale
    if not 0 < scale < math.inf:  # NaN fails too
        raise ConfigError("optimizer.tsr_scale", scale, "a positive number such as 0.75")
