# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Activation checkpointing: torchtitan's modes, and ``low_rank``.

``low_rank`` saves r-wide activations and recomputes d- and f-wide ones: no down-projection runs
twice (CoLA-M: CoLA, section 4). Under BTP the latents are saved after the all-reduce, with the
norms' statistics, so that recomputation communicates nothing (BOOST, section 4). How it does so is
in `models.low_rank_checkpoint`.
"""

from typing import Any

import torch
from torch import nn

from torchtitan_lr.compat.autograd import checkpoint_wrapper, checkpointed_modules
from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS, FLEX_ATTENTION, FLEX_ATTENTION_CALL
from torchtitan_lr.compat.prefix_attention import PREFIX_ATTENTION
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.models.families import find_family
from torchtitan_lr.models.low_rank_checkpoint import checkpoint_block, mark_in_graphs
from torchtitan_lr.models.one_device import OneDevice, Planned
from torchtitan_lr.parallel.context import GatheredAttention
from torchtitan_lr.titan.base import JobConfig, apply_ac, count_checkpointed_blocks_from

# Operators with outputs that ``selective_ac_option = "op"`` saves: the expensive ones. torchtitan
# saves every second matmul as well. Its own list lacks attention on the CPU.
SELECTIVE_SAVE_LIST = {
    torch.ops.aten.mm.default,
    *ATTENTION_OPERATORS,
    PREFIX_ATTENTION,
    FLEX_ATTENTION,
    FLEX_ATTENTION_CALL,
}

# Modes in which wrapped blocks recompute. In ``memory_budget`` the compiler chooses what to
# recompute, and its choice cannot be measured before a run: the mode counts as a share of the way
# from ``full`` to ``none``.
EAGER_MODES = ("none", "selective", "full", "low_rank")

# Modes in which torch can compile tensor-parallel blocks on a CPU: torch 2.13 cannot if attention
# is recomputed.
COMPILES_ON_CPU = ("none", "low_rank")


def check_mode(config: Any) -> None:
    """Refuse a mode that the configuration cannot have, by a ConfigError."""
    section, family = config.activation_checkpoint, find_family(config.model.name)
    key = "activation_checkpoint.mode"
    if section.mode == "low_rank" and family is not None and not family.low_rank:
        want = f"another mode for {family.model_name}, which has no low-rank activations"
        raise ConfigError(key, section.mode, want)
    fits = section.keep_inputs != "on" or section.mode == "none"
    fits &= section.keep_inputs != "on" or (family is not None and family.low_rank)
    want = f"'auto' or 'off', but for a low-rank family with {key} = 'none'"
    require(fits, "activation_checkpoint.keep_inputs", "on", want)
    if section.mode not in EAGER_MODES and not compiles_model(config):
        want = "'selective', 'full' or 'none' unless compile.enable with the component 'model'"
        raise ConfigError(key, section.mode, want)


def keeps_inputs(section: Any) -> bool:
    """Return whether low-rank blocks keep inputs of products that backward can make again."""
    return section.mode == "none" and section.keep_inputs == "on"  # ``auto`` is resolved before


def _keep_inputs(model: nn.Module) -> None:
    plan = OneDevice()  # the plans of several ranks keep them anyway, if nothing is compiled
    plan.keeps_inputs = True
    for module in model.modules():
        if isinstance(module, Planned) and module.plan is Planned.plan:
            module.plan = plan


def wrapping_period(section: Any, mode: str) -> int:
    """Return the number of blocks after which the pattern of wrapped blocks repeats."""
    # ``selective`` wraps every n-th block, or recomputes cheap operators of all blocks (``op``).
    option = section.selective_ac_option
    return int(option) if mode == "selective" and option.isdecimal() else 1


def compiles_model(job_config: Any) -> bool:
    """Return whether ``[compile]`` enables the compilation of decoder blocks."""
    return bool(job_config.compile.enable and "model" in job_config.compile.components)


def apply_activation_checkpoint(model: nn.Module, job_config: JobConfig) -> None:
    """Wrap decoder blocks in the mode of ``[activation_checkpoint]``."""
    # Call it after tensor parallelism and before compilation. An estimate passes only the sections
    # ``activation_checkpoint``, ``compile`` and ``job``.
    section: Any = job_config.activation_checkpoint
    if section.mode == "none":
        if keeps_inputs(section):
            _keep_inputs(model)
        return
    if section.mode == "low_rank":
        apply_low_rank_checkpoint(model, section.low_rank_save_attention)
    else:
        # "2" wraps every second block, counted over the whole model and not per pipeline stage.
        count_checkpointed_blocks_from(int(next(iter(getattr(model, "layers")), 0)))  # noqa: B009
        apply_ac(
            model,
            section,
            model_compile_enabled=compiles_model(job_config),
            op_sac_save_list=SELECTIVE_SAVE_LIST,
            base_folder=job_config.job.dump_folder,
        )
    for wrapped in checkpointed_modules(model):
        for module in wrapped.modules():
            if isinstance(module, GatheredAttention):
                module.repeats = False


def apply_low_rank_checkpoint(model: nn.Module, save_attention: bool) -> None:
    """Wrap every decoder block. Call this after tensor parallelism and before compilation."""
    # A block recomputes all up-projections but the last, whose result is the next block's input
    # (CoLA, section 4). Attention's output (b, s, d/T) and log-sum-exp (b, heads/T, s) may stay.
    mark_in_graphs()
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        wrapped = checkpoint_wrapper(
            block, checkpoint_fn=checkpoint_block, save_attention=save_attention
        )
        layers.register_module(name, wrapped)
