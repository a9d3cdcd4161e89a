# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Names of checkpoint folders and of the files and states in them; needs no torch."""

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import read_json

RUN_CONFIG = "job_config.json"
"""Default of ``job.save_config_file``, the run's record of its configuration: in the dump folder,
two levels above each step's folder."""

RUN_FILES = (
    *("metrics.jsonl", "summary.json", "curve.png", "run_state.json", "run.lock", "logs"),
    *("wandb_run_id", "dry_run"),
)
"""What else a run writes into its dump folder, beside the folders that have keys."""

METADATA = ".metadata"
"""DCP's table of contents. Renaming it into place is the last action of a save."""

MANIFEST = "manifest.json"
"""Sizes and checksums of the files, and the model's fingerprint (see :mod:`.manifest`)."""

HF_INDEX = "model.safetensors.index.json"
"""The last file of a checkpoint in Hugging Face's format."""

RESIDUALS = "grad_compression"
"""Key of the residuals of compressed gradients."""

TRAIN_STATE = "train_state"
"""Key of a run's counters: a checkpoint without them holds only the model."""

TRAINING_STATES = ("optimizer", "lr_scheduler", "dataloader", TRAIN_STATE, RESIDUALS)
"""All states of a checkpoint except the model's parameters, which are at its top level."""

DISCARDED, ASIDE = "discarded-", "aside-"
"""How `rename_away` names a checkpoint that is being deleted (the next start deletes what a killed
run left), and a complete one later than the step that a run resumed (the user may delete it)."""

_STEP_FOLDER = re.compile(r"step-(\d+)")


def is_dcp(folder: str | Path) -> bool:
    """Return whether a folder holds a complete DCP checkpoint; only these can be resumed."""
    # os.path, because Path.is_file() raises if a name is too long.
    return os.path.isfile(os.path.join(folder, METADATA))


def holds_training(metadata: Any) -> bool:
    """Return whether a checkpoint with this table of contents can be resumed."""
    names = metadata.state_dict_metadata
    return any(name.partition(".")[0] == TRAIN_STATE for name in names)


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


def newest_step(folder: str | Path) -> int:
    """Return the step that a run resumes: the newest complete one with finite weights.

    If none has finite weights it is the newest complete one, which no run resumes; -1 for none.
    """
    steps = complete_steps(folder)
    good = (step for step in reversed(steps) if is_finite(step_folder(folder, step)))
    return next(good, max(steps, default=-1))


def is_finite(folder: str | Path) -> bool:
    """Return whether a checkpoint's weights are finite, as far as its manifest tells."""
    try:
        return read_json(Path(folder) / MANIFEST).get("finite") is not False
    except (OSError, ValueError):  # damaged: the load says so
        return True


def step_folder(folder: str | Path, step: int) -> str:
    """Return the path of a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file by a rename: after a crash it is the old one or the new one.

    Raises:
        OSError: The disk is full; the error names the file.
    """
    try:
        with open(f"{path}.tmp", "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(f"{path}.tmp")
        error.filename = str(path)  # a failed write names no file
        raise


UNFINISHED = ".unfinished"
"""Folder in the output folder of a command, with what it has written so far."""

_MOVING = "moving.json"
"""File in it: the names of what is moved out of it at the end."""


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Give a folder to write into, whose content is moved into ``out`` at the end.

    A failed command leaves nothing. A killed one leaves `UNFINISHED`, and what it had moved out of
    it already; the next command into the same folder deletes both.

    Args:
        out: A folder that is new or empty, see `is_free`.

    Raises:
        OSError: The folder cannot be written, or another process is writing it.
    """
    aside, is_new = out / UNFINISHED, not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError), _locked(aside):
        for name in _half_moved(out):
            moved = out / name
            shutil.rmtree(moved) if moved.is_dir() else moved.unlink(missing_ok=True)
        shutil.rmtree(aside)
    aside.mkdir()
    try:
        with _locked(aside):
            yield aside
            names = os.listdir(aside)
            (aside / _MOVING).write_text(json.dumps({"names": names}))
            for name in names:
                (aside / name).rename(out / name)
    finally:
        shutil.rmtree(aside)
        if is_new:
            with suppress(OSError):  # it is not empty
                out.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    number, busy = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy = True
        if busy:
            raise OSError(errno.EBUSY, "another process is writing it")
        yield
    finally:
        os.close(number)


def is_free(out: Path) -> bool:
    """Return whether a folder is new or empty; what a killed command left does not count."""
    if not out.exists():
        return True
    return out.is_dir() and {*os.listdir(out)} <= {UNFINISHED, *_half_moved(out)}


def _half_moved(out: Path) -> list[str]:
    """Return what a killed command was moving into a folder; nothing if it had moved all."""
    aside = out / UNFINISHED
    try:
        names = read_json(aside / _MOVING)["names"]
    except (OSError, ValueError, KeyError):  # it was killed before it moved anything
        return []
    if os.listdir(aside) == [_MOVING]:
        return []
    return [name for name in names if Path(name).name == name]


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
