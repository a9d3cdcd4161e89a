# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The base class of modes of activation checkpointing, and their registry.

Each mode is one class: torchtitan's in `titan_modes`, ``low_rank`` in `low_rank_checkpoint`. A mode
does not state its memory or its repeated collectives: the estimator measures both on blocks wrapped
by `CheckpointingMode.apply`.
"""

from typing import Any

from torch import nn

from torchtitan_lr.config.schema import AC_MODES
from torchtitan_lr.titan.base import JobConfig


class CheckpointingMode:
    """A mode of activation checkpointing: which activations backward recomputes.

    Attributes:
        name: The value of ``activation_checkpoint.mode``.
        recomputes: Whether anything is recomputed.
        eager: Whether wrapped blocks recompute. Otherwise the compiler does, and the estimator
            cannot measure it.
        low_rank: Whether it needs a low-rank model. Comparisons with full rank use ``full``
            instead.
        compiles_on_cpu: Whether torch can compile tensor-parallel blocks in this mode on a CPU.
            Torch 2.13 cannot if attention is recomputed.
    """

    name: str
    recomputes: bool = True
    eager: bool = True
    low_rank: bool = False
    compiles_on_cpu: bool = False

    def check(self, config: Any) -> None:
        """Raise for a configuration in which this mode cannot run.

        Raises:
            ConfigError: With one line that names the key.
        """

    def check_split_backward(self, section: Any, schedule: str) -> None:
        """Raise if this mode cannot run under a schedule with a split backward.

        Both halves of backward run the graph of a block, so it is recomputed twice.

        Raises:
            ConfigError: With one line that names the key.
        """

    def apply(self, model: nn.Module, job_config: JobConfig) -> None:
        """Wrap the decoder blocks. Call this after tensor parallelism and before compilation.

        Args:
            model: The whole model or a pipeline stage of it.
            job_config: The run's configuration. An estimate passes only the sections
                ``activation_checkpoint``, ``compile`` and ``job``.
        """
        raise NotImplementedError

    def period(self, section: Any) -> int:
        """Return the number of blocks after which the pattern of wrapped blocks repeats."""
        return 1

    def between(self, section: Any) -> tuple[str, str, float]:
        """Return two modes that bound this mode's memory, and its position between them.

        Used for modes that are not `eager`.

        Returns:
            The mode that saves least, the mode that saves most, and the position between them, from
            0 (the first) to 1.
        """
        raise NotImplementedError


MODES: dict[str, CheckpointingMode] = {}
"""Modes by name; `activation_checkpoint` registers those of this package."""


def register_mode(mode: CheckpointingMode) -> None:
    """Register a mode, and add its name to the values of ``activation_checkpoint.mode``."""
    MODES[mode.name] = mode
    if mode.name not in AC_MODES:
        AC_MODES.append(mode.name)


def compiles_model(job_config: Any) -> bool:
    """Return whether ``[compile]`` enables the compilation of decoder blocks."""
    return bool(job_config.compile.enable and "model" in job_config.compile.components)
