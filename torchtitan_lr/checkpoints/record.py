# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``step.json``, the record of a saved step, and what a run begins with; needs no torch.

It is written last, by a rename: a step is complete if it has one, and a killed save has none. The
launcher and the ranks ask the same of a start (`check_start`).
"""

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints import folders
from torchtitan_lr.checkpoints.folders import STEP_FILE, TRAIN_STATE
from torchtitan_lr.config.files import read_json, sealed, unsealed
from torchtitan_lr.errors import ConfigError

FORMAT = 1
"""A record of another format is refused."""

Sum = list[int]
"""Size in bytes and CRC-32 of a file; a list, since JSON has no tuples."""

Identity = Mapping[str, Mapping[str, Any]]
"""What each state belongs to: values by the TOML key that sets them, by the state's name."""


class DamagedError(Exception):
    """A file of a checkpoint is not what was saved; the message names it within its folder."""


def describe(error: BaseException) -> str:
    """Say in one line of what kind an exception is and what it says, if it says anything."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


@dataclass(frozen=True)
class Record:
    """What a saved step says of itself."""

    states: Identity = field(default_factory=dict)  # the saved states, with what each belongs to
    run: Mapping[str, Any] = field(default_factory=dict)  # `checkpoints.run_record`
    files: Mapping[str, Sum] = field(default_factory=dict)  # by name, all except this record
    finite: bool = True  # whether the weights and the sums of their squares were
    format: int = FORMAT

    def write(self, step_dir: str | Path) -> None:
        """Write the record into its step's folder: the step is complete."""
        folders.write_whole(Path(step_dir) / STEP_FILE, json.dumps(sealed(asdict(self)), indent=1))


def read_step(step_dir: str | Path) -> Record:
    """Read a step's record, or raise a DamagedError if it is not what was written."""
    try:
        content = unsealed(read_json(Path(step_dir) / STEP_FILE))
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')}, this version's is {FORMAT}")
        record = Record(**content)
        for size, checksum in record.files.values():
            if type(size) is not int or type(checksum) is not int:
                raise TypeError("a size or a checksum is no integer")
        for values in (record.run, *record.states.values()):
            values.items()
    except FileNotFoundError as error:
        raise DamagedError(f"{STEP_FILE} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"{STEP_FILE} cannot be read ({describe(error)})") from error
    return record


@dataclass(frozen=True)
class Start:
    """The saved weights that a run begins with."""

    folder: str  # of the step
    step: int = -1  # -1 for weights of another run, which begins with step 0
    model_only: bool = False  # whether no other state is loaded
    in_hf: bool = False  # whether they are in Hugging Face's format
    left_out: list[str] = field(default_factory=list)  # names of states that are not loaded

    def refusal(self, dump_folder: str, key: str, got: object, want: str) -> ConfigError:
        """Return the error of a start from here, with what would work."""
        if self.step < 0:
            return ConfigError(key, got, want)
        steps = Path(self.folder).parent
        older = folders.newest_step(steps, before=self.step)
        if older > 0 and folders.is_finite(folders.step_folder(steps, older)):
            want += f"; checkpoint.load_step = {older} goes back to the step before"
        want += f"; for a new run choose another folder, as in {another_folder(dump_folder)}"
        return ConfigError(key, got, want)


def start_of(checkpoint: Any, dump_folder: str, step: int = -1) -> Start | None:
    """Return what a run begins with by ``[checkpoint]``; None for random weights.

    ``step`` is the own one to go back to, or -1 for the newest, which is loaded whole.
    """
    if not checkpoint.enable:
        return None
    own, left_out = os.path.join(dump_folder, checkpoint.folder), checkpoint.exclude_from_loading
    newest = folders.newest_step(own) if step == -1 else step
    if newest != -1:
        left_out = left_out if step != -1 else []
        return Start(folders.step_folder(own, newest), newest, newest == 0, left_out=left_out)
    path, in_hf = checkpoint.initial_load_path or "", checkpoint.initial_load_in_hf
    if not (path or in_hf):
        return None
    return Start(path, -1, checkpoint.initial_load_model_only, in_hf, left_out)


def check_start(start: Start, record: Record, here: Identity, dump_folder: str = "") -> None:
    """Refuse a step whose states are not those of a run; ``here`` says what the run's belong to."""
    if not record.finite:
        want = "one with finite weights"
        raise start.refusal(dump_folder, "checkpoint", start.folder, want)
    if start.step > 0 and TRAIN_STATE in start.left_out:
        want = f"other states of the run's own step {start.step}{way_on(start, TRAIN_STATE)}"
        raise ConfigError("checkpoint.exclude_from_loading", TRAIN_STATE, want)
    for state, values in here.items():
        if state in start.left_out or (start.model_only and state != "model"):
            continue
        if state not in record.states:
            want = f"one with {state}: it holds {', '.join(record.states)}{way_on(start, state)}"
            raise start.refusal(dump_folder, "checkpoint", start.folder, want)
        for key, was in record.states[state].items():
            if (now := values.get(key)) != was:
                want = f"{was!r} as in {start.folder}{way_on(start, state)}"
                raise start.refusal(dump_folder, key, now, want)


def way_on(start: Start, state: str) -> str:
    """Say how a run goes on without a state, as the end of a sentence."""
    if state == "model":
        return ", which holds another model"
    if state == TRAIN_STATE:
        return f"; checkpoint.initial_load_path = {start.folder!r} starts a run from its weights"
    of_own = f" --checkpoint.load_step={start.step}" if start.step > 0 else ""
    names = ",".join([*start.left_out, state])
    return f"; --checkpoint.exclude_from_loading={names}{of_own} goes on without its {state}"


def another_folder(dump_folder: str) -> str:
    """Return the override with a dump folder beside this one that does not exist."""
    folder = dump_folder.rstrip("/")
    names = (f"{folder}-{number}" for number in itertools.count(2))
    return f"--job.dump_folder={next(name for name in names if not Path(name).exists())}"
