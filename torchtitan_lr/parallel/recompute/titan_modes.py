# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's modes: ``none``, ``selective``, ``full``, ``memory_budget``."""

from typing import Any

import torch
from torch import nn

from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.recompute.mode import CheckpointingMode, compiles_model
from torchtitan_lr.titan.base import JobConfig, apply_ac, count_checkpointed_blocks_from

SELECTIVE_SAVE_LIST = {torch.ops.aten.mm.default, *ATTENTION_OPERATORS}
"""Operators with outputs that ``selective_ac_option = "op"`` saves: the expensive ones.

torchtitan saves every second matmul as well. Its own list lacks attention on the CPU.
"""


class NoCheckpointing(CheckpointingMode):
    """``none``: recompute nothing."""

    name = "none"
    recomputes = False
    compiles_on_cpu = True

    def apply(self, model: nn.Module, job_config: JobConfig) -> None:
        """Leave the model as it is."""


class TitanMode(CheckpointingMode):
    """A mode that torchtitan applies to each block, or as a compiler setting."""

    def apply(self, model: nn.Module, job_config: JobConfig) -> None:
        """As `CheckpointingMode.apply`.

        ``selective_ac_option = "2"`` wraps every second block, counted over the whole model and not
        per pipeline stage.
        """
        count_checkpointed_blocks_from(int(next(iter(getattr(model, "layers")), 0)))  # noqa: B009
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiles_model(job_config),
            op_sac_save_list=SELECTIVE_SAVE_LIST,
            base_folder=job_config.job.dump_folder,
        )


class Selective(TitanMode):
    """``selective``: wrap every n-th block, or recompute cheap operators of all blocks (``op``).

    A wrapped block saves its input. With ``op`` it also saves the outputs of attention and of every
    second matmul.
    """

    name = "selective"

    def check_split_backward(self, section: Any, schedule: str) -> None:
        """Refuse ``op``: torch frees the saved outputs after the first recomputation."""
        if section.selective_ac_option == "op":
            want = (
                f"a number of blocks, as text, with the schedule {schedule}: torch repeats once "
                "only"
            )
            raise ConfigError("activation_checkpoint.selective_ac_option", "op", want)

    def period(self, section: Any) -> int:
        """Return n: every n-th block is wrapped."""
        option = section.selective_ac_option
        return int(option) if option.isdecimal() else 1


class Full(TitanMode):
    """``full``: save a block's input and recompute the block, collectives included."""

    name = "full"


class MemoryBudget(TitanMode):
    """``memory_budget``: the compiler chooses what to save, up to a share of the activations."""

    name = "memory_budget"
    eager = False

    def check(self, config: Any) -> None:
        """Require compiled blocks and a share between 0 and 1."""
        if not compiles_model(config):
            want = "'selective', 'full' or 'none' unless compile.enable with the component 'model'"
            raise ConfigError("activation_checkpoint.mode", self.name, want)
        budget = config.activation_checkpoint.memory_budget
        if not 0 <= budget <= 1:
            raise ConfigError("activation_checkpoint.memory_budget", budget, "a number from 0 to 1")

    def between(self, section: Any) -> tuple[str, str, float]:
        """Interpolate linearly between ``full`` and ``none``."""
        return Full.name, NoCheckpointing.name, section.memory_budget
