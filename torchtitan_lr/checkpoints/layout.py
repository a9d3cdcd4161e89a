# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a checkpoint's folder is called and what lies in it; reading this needs no torch."""

import os
import re
from pathlib import Path

RUN_CONFIG = "job_config.json"
"""The run's own record of its configuration, where ``job.save_config_file`` names no other: in the
dump folder, two levels above each step's folder."""

METADATA = ".metadata"
"""DCP's table of contents. Its renaming into place is the last act of a save."""

MANIFEST = "manifest.json"
"""Sizes and checksums of the files, and what model they hold (see :mod:`.manifest`)."""

HF_INDEX = "model.safetensors.index.json"
"""The last file of a checkpoint in Hugging Face's format."""

RESIDUALS = "grad_compression"
"""State of compressed gradients: what was not sent."""

LANES = "caat"
"""State of a model with lanes: their number and the fraction they share."""

TRAINING_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", RESIDUALS, LANES)
"""All states of a checkpoint beside the model's parameters, which stand at its top level."""

STEP_FOLDER = re.compile(r"step-(\d+)")
"""The name of a checkpoint's folder."""


def is_dcp(folder: str | Path) -> bool:
    """Say whether a folder holds a complete checkpoint of DCP: that alone can be resumed."""
    # os.path, because Path.is_file() raises where a name is too long.
    return os.path.isfile(os.path.join(folder, METADATA))


def is_complete(folder: str | Path) -> bool:
    """Say whether a save into the folder has ended, in DCP's format or in Hugging Face's."""
    return is_dcp(folder) or os.path.isfile(os.path.join(folder, HF_INDEX))


def all_steps(folder: str | Path) -> list[int]:
    """Return the steps that have a folder, complete or not, in order.

    Args:
        folder: What holds ``step-1``, ``step-2`` and so on; there need be no such folder.
    """
    if not os.path.isdir(folder):
        return []
    matches = map(STEP_FOLDER.fullmatch, os.listdir(folder))
    return sorted(int(match.group(1)) for match in matches if match)


def complete_steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order; none where it is not."""
    return [step for step in all_steps(folder) if is_complete(step_folder(folder, step))]


def step_folder(folder: str | Path, step: int) -> str:
    """Return the path of a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")
