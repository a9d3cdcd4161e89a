# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Names of checkpoint folders and of the files and states in them; needs no torch."""

import errno
import fcntl
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_lr.config.files import read_json

RUN_CONFIG = "job_config.json"
"""Default of ``job.save_config_file``, the record of a run's last start in its dump folder."""

STEP_FILE = "step.json"
"""A saved step's record (`checkpoints.record`). Writing it is the last action of a save."""

BEGUN = "step.begun"  # there while a save writes METADATA and the record
METADATA = ".metadata"
"""DCP's table of contents."""

HF_INDEX = "model.safetensors.index.json"
"""The last file of weights in Hugging Face's format."""

RESIDUALS = "grad_compression"
"""Key of the residuals of compressed gradients."""

TRAIN_STATE = "train_state"
"""Key of a run's counters: a checkpoint without them holds only the model."""

OUTER = "outer"
"""Key of what outer steps have: momentum, and each replica's own weights and residuals."""

TRAINING_STATES = ("optimizer", "lr_scheduler", "dataloader", TRAIN_STATE, RESIDUALS, OUTER)
"""All states of a checkpoint except the model's parameters, which are at its top level."""

DISCARDED, ASIDE = "discarded-", "aside-"
"""How `rename_away` names a step that is being deleted, and one that only the user may delete."""

_STEP_FOLDER = re.compile(r"step-(\d+)")


def is_complete(folder: str | Path) -> bool:
    """Return whether a save into the folder has ended."""
    # os.path, because Path.is_file() raises if a name is too long.
    return os.path.isfile(os.path.join(folder, STEP_FILE))


def is_dcp(folder: str | Path) -> bool:
    """Return whether a complete step is in DCP's format; only these can be resumed."""
    return is_complete(folder) and os.path.isfile(os.path.join(folder, METADATA))


def has_contents(folder: str | Path) -> bool:
    """Return whether a folder has a table of contents, other than that of a killed save."""
    if os.path.exists(os.path.join(folder, BEGUN)):
        return False
    return any(os.path.isfile(os.path.join(folder, name)) for name in (METADATA, HF_INDEX))


def all_steps(folder: str | Path) -> list[int]:
    """Return the steps that have a ``step-N``, complete or not, in a folder that may not exist."""
    if not os.path.isdir(folder):
        return []
    matches = map(_STEP_FOLDER.fullmatch, os.listdir(folder))
    return sorted(int(match.group(1)) for match in matches if match)


def complete_steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder that may not exist, in order."""
    return [step for step in all_steps(folder) if is_complete(step_folder(folder, step))]


def newest_step(folder: str | Path, before: int = sys.maxsize) -> int:
    """Return the step that a run resumes: the newest complete one with finite weights.

    If none has finite weights it is the newest complete one, which no run resumes; -1 for none.
    """
    steps = [step for step in complete_steps(folder) if step < before]
    good = (step for step in reversed(steps) if is_finite(step_folder(folder, step)))
    return next(good, max(steps, default=-1))


def is_finite(folder: str | Path) -> bool:
    """Return whether a complete step's weights are finite, as far as its record tells."""
    try:
        return read_json(Path(folder) / STEP_FILE).get("finite") is not False
    except (OSError, ValueError):  # damaged: the load says so
        return True


def step_folder(folder: str | Path, step: int) -> str:
    """Return the path of a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file by a rename: after a crash it is the old one or the new one."""
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
"""Folder of what a command has written so far: in an existing output folder, beside a new one."""


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Give a folder to write into, whose content is in ``out``, a free folder, at the end.

    A failed command leaves nothing; what a killed one leaves, the next one deletes. OSError if
    another command writes there.
    """
    # A new folder appears whole, by one rename. An existing one may be a mount point or the
    # working directory, so its files are moved into it, and `UNFINISHED` leaves it last.
    is_new = not out.exists()
    aside = out.with_name(f".{out.name}{UNFINISHED}") if is_new else out / UNFINISHED
    aside.mkdir(parents=True, exist_ok=True)
    lock = os.open(aside, os.O_RDONLY)
    try:
        _lock(lock, aside)
        for left in aside.iterdir():
            _delete(left)
        try:
            yield aside
            if is_new:
                aside.rename(out)  # an OSError if it holds something by now
            elif not is_free(out):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(out))
            else:
                for written in sorted(aside.iterdir()):
                    written.rename(out / written.name)
                aside.rmdir()
        except BaseException:
            _delete(aside)
            raise
    finally:
        os.close(lock)


def _lock(folder: int, path: Path) -> None:
    """Lock an open folder; an error if another command has it, or has ended since it was opened."""
    busy = BlockingIOError(errno.EAGAIN, "another command is writing there", str(path))
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:  # this file system has no locks
        return
    if not path.exists() or not os.path.samestat(os.fstat(folder), path.stat()):
        raise busy


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_free(out: Path) -> bool:
    """Return whether a folder is new or empty; what a killed command left does not count."""
    return not out.exists() or (out.is_dir() and {*os.listdir(out)} <= {UNFINISHED})


def rename_away(folder: str, prefix: str) -> str | None:
    """Rename a step atomically with `DISCARDED` or `ASIDE`, if there is one; return its new path.

    No resume finds it then.
    """
    if not os.path.isdir(folder):
        return None
    parent, name = os.path.split(folder.rstrip("/"))
    names = (f"{prefix}{name.removeprefix('step-')}-{n}" for n in itertools.count())
    target = next(path for n in names if not os.path.exists(path := os.path.join(parent, n)))
    os.rename(folder, target)
    return target
