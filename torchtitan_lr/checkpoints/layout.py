# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Names of checkpoint folders and of the files and states in them; needs no torch."""

import itertools
import os
import re
from pathlib import Path

RUN_CONFIG = "job_config.json"
"""Default of ``job.save_config_file``, the run's record of its configuration: in the dump folder,
two levels above each step's folder."""

METADATA = ".metadata"
"""DCP's table of contents. Renaming it into place is the last action of a save."""

MANIFEST = "manifest.json"
"""Sizes and checksums of the files, and the model's fingerprint (see :mod:`.manifest`)."""

HF_INDEX = "model.safetensors.index.json"
"""The last file of a checkpoint in Hugging Face's format."""

RESIDUALS = "grad_compression"
"""Key of the residuals of compressed gradients."""

LANES = "caat"
"""Key of the lanes in checkpoints of earlier versions; the manifest has them now."""

TRAINING_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", RESIDUALS, LANES)
"""All states of a checkpoint except the model's parameters, which are at its top level."""

DISCARDED, ASIDE = "discarded-", "aside-"
"""How `rename_away` names a checkpoint that is being deleted (the next start deletes what a killed
run left), and a complete one later than the step that a run resumed (the user may delete it)."""

_STEP_FOLDER = re.compile(r"step-(\d+)")


def is_dcp(folder: str | Path) -> bool:
    """Return whether a folder holds a complete DCP checkpoint; only these can be resumed."""
    # os.path, because Path.is_file() raises if a name is too long.
    return os.path.isfile(os.path.join(folder, METADATA))


def is_complete(folder: str | Path) -> bool:
    """Return whether a save into the folder has ended, in DCP's or Hugging Face's format."""
    return is_dcp(folder) or os.path.isfile(os.path.join(folder, HF_INDEX))


def all_steps(folder: str | Path) -> list[int]:
    """Return the steps that have a ``step-N``, complete or not, in a folder that may not exist."""
    if not os.path.isdir(folder):
        return []
    matches = map(_STEP_FOLDER.fullmatch, os.listdir(folder))
    return sorted(int(match.group(1)) for match in matches if match)


def complete_steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder that may not exist, in order."""
    return [step for step in all_steps(folder) if is_complete(step_folder(folder, step))]


def step_folder(folder: str | Path, step: int) -> str:
    """Return the path of a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")


def write_text(path: Path, text: str) -> None:
    """Write a file by a rename, so that no reader finds half of it; then it is on the disk."""
    scratch = path.with_name(f"{path.name}.tmp")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def rename_away(folder: str, prefix: str) -> str | None:
    """Rename a checkpoint's folder atomically with `DISCARDED` or `ASIDE`: no resume finds it.

    Returns:
        The new path; None if there is no such folder.
    """
    if not os.path.isdir(folder):
        return None
    parent, name = os.path.split(folder.rstrip("/"))
    names = (f"{prefix}{name.removeprefix('step-')}-{n}" for n in itertools.count())
    target = next(path for n in names if not os.path.exists(path := os.path.join(parent, n)))
    os.rename(folder, target)
    return target
