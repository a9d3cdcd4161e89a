# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``step.json``, the record of a saved step; needs no torch.

It is written last, by a rename: a step is complete if it has one, and a killed save has none.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import STEP_FILE, write_whole
from torchtitan_lr.config.files import read_json, sealed, unsealed

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
    """What a saved step says of itself.

    Attributes:
        states: The saved states, with what each belongs to.
        run: The record of its run (`checkpoints.run_record`).
        files: Size and checksum by name, of all files except this record.
        finite: Whether the weights and the sums of their squares were finite.
    """

    states: Identity = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Sum] = field(default_factory=dict)
    finite: bool = True
    format: int = FORMAT

    def write(self, step_dir: str | Path) -> None:
        """Write the record into its step's folder: the step is complete."""
        write_whole(Path(step_dir) / STEP_FILE, json.dumps(sealed(asdict(self)), indent=1))


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
