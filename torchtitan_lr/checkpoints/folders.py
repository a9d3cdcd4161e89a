# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Names of checkpoint folders and of the files and states in them; needs no torch."""

import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_lr.config.files import read_json

RUN_CONFIG = "job_config.json"  # default of ``job.save_config_file``: the last start of a run

STEP_FILE = "step.json"  # a step's record (`checkpoints.record`), the last file of its save
BEGUN = "step.begun"  # there while a save writes METADATA and the record
METADATA = ".metadata"  # DCP's table of contents
HF_INDEX = "model.safetensors.index.json"  # the last file of weights in Hugging Face's format

RESIDUALS = "grad_compression"  # key of the residuals of compressed gradients
TRAIN_STATE = "train_state"  # key of a run's counters; without them a checkpoint has only the model
OUTER = "outer"  # key of outer steps' momentum, and of each replica's own weights and residuals
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


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Give a folder in ``out``, new or empty, whose files move up into ``out`` at the end.

    A failed command leaves nothing. A killed one leaves a folder that `is_free` does not call free.
    """
    is_new, aside = not out.exists(), out / ".unfinished"
    aside.mkdir(parents=True)
    try:
        yield aside
        if [*out.iterdir()] != [aside]:
            raise FileExistsError(errno.EEXIST, "another command has written there", str(out))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it holds what another command has written
                out.rmdir()
        raise
    # `out` stays the folder that it is: it may be a mount point or the working directory.
    for written in aside.iterdir():
        written.rename(out / written.name)
    aside.rmdir()


def is_free(out: Path) -> bool:
    """Return whether a folder is new or empty."""
    return not out.exists() or (out.is_dir() and not any(out.iterdir()))


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
