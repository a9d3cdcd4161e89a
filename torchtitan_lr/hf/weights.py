# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weights of a checkpoint by this package's names, read on demand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_lr.checkpoints.safe_metadata import load
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs


@dataclass(frozen=True)
class StoredWeights:
    """The verified weights of a checkpoint of any number of ranks, read when they are needed.

    Attributes:
        args: The model's arguments.
        step_dir: Folder of the distributed checkpoint (DCP).
        metadata: The checkpoint's table of contents.
        shapes: Shape of every parameter by name, in the model's order.
        dtype: Precision of all weights.
    """

    args: LlamaArgs
    step_dir: Path
    metadata: Metadata
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read whole parameters onto the CPU.

        Raises:
            ConfigError: A file is damaged.
        """
        weights = {name: torch.empty(self.shapes[name], dtype=self.dtype) for name in names}
        self.fill(weights)
        return weights

    def fill(self, weights: dict[str, Tensor], no_dist: bool = True) -> None:
        """Read into existing tensors.

        Args:
            weights: Tensors by name; of a DTensor only this rank's part is read.
            no_dist: False if every rank of the process group calls this.

        Raises:
            ConfigError: A file is damaged.
        """
        try:
            load(weights, self.step_dir, no_dist=no_dist, metadata=self.metadata)
        # A damaged file can raise any exception; DCP wraps some of them in CheckpointException,
        # which derives from BaseException.
        except (Exception, CheckpointException) as error:
            raise no_checkpoint(self.step_dir, "damaged files") from error


def no_checkpoint(step_dir: Path, why: str) -> ConfigError:
    """Return the error of a folder that is no whole checkpoint."""
    if not step_dir.is_dir():
        why = "no such folder; a run that trains keeps its newest checkpoint.keep_latest_k steps"
    want = f"a complete checkpoint such as outputs/checkpoint/step-100 (found: {why})"
    return ConfigError("CHECKPOINT", str(step_dir), want)
