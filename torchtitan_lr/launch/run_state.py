# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``run_state.json`` in the dump folder: how a run ended, where and why. Needs no torch.

Rank 0 writes it when training starts and ends, and the rank that fails first when it fails; the
launcher writes it where no rank could. A start that is refused, or ends before training, leaves
the record of the run in the folder. A run whose file says ``running`` while nothing holds its
folder was killed without any chance to write.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import open_regular, read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import LOCK_FILE, taken

STATE_FILE = "run_state.json"

RUNNING = "running"
FINISHED, STOPPED = ENDS = ("finished", "stopped")
FAILED, REFUSED, DIVERGED = FAILURES = ("failed", "refused", "diverged")

EXIT_STATUS = {FINISHED: 0, STOPPED: 0, FAILED: 1, REFUSED: 2, DIVERGED: 3}
"""Exit status of a rank, and of the launcher, by the run's end."""

AGAIN_THE_SAME = (EXIT_STATUS[REFUSED], EXIT_STATUS[DIVERGED])
"""Exit statuses of ends to which a restart would come again."""


def write_state(
    dump_folder: str | Path,
    state: str,
    error: str = "",  # one line
    rank: int | None = None,  # at fault
    step: int | None = None,
    began: float = math.inf,  # when this start began, in seconds since the epoch
) -> None:
    """Record a run's state; a disk without space or the right to write leaves the old record.

    A failure replaces neither of the ends "finished" and "stopped": training that began after them
    has recorded "running". Nor does it replace a failure of the same start, which was the first.
    """
    path = Path(dump_folder) / STATE_FILE
    before = read_state(dump_folder)
    if state in FAILURES and before is not None and has_ended(before, began):
        return
    record = {"state": state, "rank": rank, "step": step, "error": error, "time": time.time()}
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        scratch.write_text(json.dumps(record) + "\n")
        scratch.replace(path)


def has_ended(record: Mapping[str, Any], began: float) -> bool:
    """Return whether a record tells the end of a run for a start that began at a time."""
    if record["state"] in ENDS:
        return True
    return record["state"] in FAILURES and is_since(record, began)


def is_since(record: Mapping[str, Any], began: float) -> bool:
    """Return whether a record is of a start that began at a time."""
    when = record.get("time")
    return isinstance(when, int | float) and when >= began


def read_state(dump_folder: str | Path) -> dict[str, Any] | None:
    """Return what `write_state` recorded, None without a readable record."""
    try:
        record = read_json(Path(dump_folder) / STATE_FILE)
    except (OSError, ValueError):
        return None
    return record if isinstance(record.get("state"), str) else None


@contextlib.contextmanager
def holder_named(dump_folder: str) -> Iterator[None]:
    """Name the job that uses a folder where a start in it is refused.

    What a check finds there changes while that job trains.

    Raises:
        ConfigError: The start is refused.
    """
    try:
        yield
    except ConfigError as error:
        if is_held(dump_folder):
            raise taken(dump_folder) from error
        raise


def is_held(dump_folder: str | Path) -> bool:
    """Return whether a process holds the folder's ``run.lock``."""
    try:
        with open_regular(Path(dump_folder) / LOCK_FILE) as file:
            # Released at the end of the block. A run that starts in this moment tries twice.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
