# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Activation checkpointing: torchtitan's ``full | selective | memory_budget``, and ``low_rank``."""

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import activation_checkpoint as titan_ac

from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS
from torchtitan_lr.compat.titan import count_checkpointed_blocks_from
from torchtitan_lr.parallel.recompute.low_rank_checkpoint import apply_low_rank_checkpoint

SELECTIVE_SAVE_LIST = {torch.ops.aten.mm.default, *ATTENTION_OPERATORS}
"""The operators whose outputs ``selective_ac_option = "op"`` keeps: the dear ones to repeat.

torchtitan keeps every second matmul on top of this; its own list lacks the CPU's attention.
"""


def apply_activation_checkpoint(model: nn.Module, job_config: JobConfig) -> None:
    """Wrap each decoder block as ``[activation_checkpoint]`` says; ``none`` leaves it alone.

    ``selective_ac_option = "2"`` wraps every second block of the whole model, whatever stage of a
    pipeline holds it.
    """
    section = job_config.activation_checkpoint
    if section.mode == "none":
        return
    if section.mode == "low_rank":
        apply_low_rank_checkpoint(model, section.low_rank_save_attention)
        return
    count_checkpointed_blocks_from(int(next(iter(getattr(model, "layers")), 0)))  # noqa: B009
    titan_ac.apply_ac(
        model,
        section,
        model_compile_enabled=compiles_model(job_config),
        op_sac_save_list=SELECTIVE_SAVE_LIST,
        base_folder=job_config.job.dump_folder,
    )


def compiles_model(job_config: JobConfig) -> bool:
    """Return whether ``[compile]`` asks for the decoder blocks to be compiled."""
    return job_config.compile.enable and "model" in job_config.compile.components
