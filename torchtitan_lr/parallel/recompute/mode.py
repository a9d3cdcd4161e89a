# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a mode of activation checkpointing is: what it wraps, refuses, keeps and recomputes.

Each mode is one class: torchtitan's in `titan_modes`, ``low_rank`` in `low_rank_checkpoint`. What
it keeps in memory and which collectives it repeats is not stated here: the estimator rehearses the
blocks that `CheckpointingMode.apply` has wrapped.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.config import JobConfig

from torchtitan_lr.config.schema import AC_MODES


@dataclass(frozen=True)
class BlockFlops:
    """FLOPs of a block's forward products, for one sequence on one rank.

    Args:
        attention_linears: q, k, v and o, both factors of each in a low-rank model.
        attention_scores: q kᵀ, and its softmax times v.
        feed_forward: gate, up and down, as above.
        up_projections: The factors B of all these but down, the last; 0 at full rank.
    """

    attention_linears: float
    attention_scores: float
    feed_forward: float
    up_projections: float

    @property
    def whole(self) -> float:
        """All products of the block."""
        return self.attention_linears + self.attention_scores + self.feed_forward


class CheckpointingMode:
    """One way to recompute in backward instead of saving; a subclass is a mode.

    Attributes:
        name: The value of ``activation_checkpoint.mode``.
        recomputes: Whether anything is recomputed.
        eager: Whether the blocks themselves carry it out. Otherwise the compiler does, and no
            rehearsal shows what it repeats.
        low_rank: Whether it needs a low-rank model. In comparisons with full rank, ``full`` takes
            its place.
        compiles_on_cpu: Whether torch compiles tensor-parallel blocks with it on a CPU. Torch 2.13
            does not where attention is repeated.
    """

    name: str
    recomputes: bool = True
    eager: bool = True
    low_rank: bool = False
    compiles_on_cpu: bool = False

    def check(self, config: Any) -> None:
        """Refuse a configuration in which this mode cannot run.

        Args:
            config: The run's, with this mode.

        Raises:
            ConfigError: With one line that names the key.
        """

    def check_split_backward(self, section: Any, schedule: str) -> None:
        """Refuse a pipeline schedule whose backward comes in two halves.

        Both halves run through the graph of a block, so that it is recomputed twice.

        Args:
            section: ``[activation_checkpoint]``.
            schedule: Name of the schedule.

        Raises:
            ConfigError: With one line that names the key.
        """

    def apply(self, model: nn.Module, job_config: JobConfig) -> None:
        """Wrap the decoder blocks; after tensor parallelism and before compilation.

        Args:
            model: The whole model or a pipeline stage of it.
            job_config: The run's configuration. An estimate gives one with the sections
                ``activation_checkpoint``, ``compile`` and ``job`` only.
        """
        raise NotImplementedError

    def period(self, section: Any) -> int:
        """Return the number of blocks after which the pattern of wrapped blocks repeats.

        Args:
            section: ``[activation_checkpoint]``.
        """
        return 1

    def between(self, section: Any) -> tuple[str, str, float]:
        """Return two modes that bound the memory of one that is not `eager`, and its place.

        Args:
            section: ``[activation_checkpoint]``.

        Returns:
            The mode that keeps least, the mode that keeps most, and the share of the way from the
            first to the second.
        """
        raise NotImplementedError

    def repeated_flops(self, section: Any, block: BlockFlops) -> float:
        """Return the FLOPs that are repeated, for one sequence on one rank; a mean over blocks.

        Args:
            section: ``[activation_checkpoint]``.
            block: The forward products of a block.
        """
        raise NotImplementedError


MODES: dict[str, CheckpointingMode] = {}
"""Modes by name; `activation_checkpoint` registers those of this package."""


def register_mode(mode: CheckpointingMode) -> None:
    """Make a mode known under its name, also as a value of ``activation_checkpoint.mode``.

    Args:
        mode: The mode.
    """
    MODES[mode.name] = mode
    if mode.name not in AC_MODES:
        AC_MODES.append(mode.name)


def compiles_model(job_config: Any) -> bool:
    """Return whether ``[compile]`` asks for the decoder blocks to be compiled."""
    return bool(job_config.compile.enable and "model" in job_config.compile.components)
