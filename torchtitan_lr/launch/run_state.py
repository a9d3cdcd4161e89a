# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``run_state.json`` in the dump folder: how a run ended, and why. Needs no torch.

Rank 0 writes it when training starts and ends; the launcher writes it where a rank could not, with
the cause that it found. A start that is refused, or ends before training, leaves the record of the
run in the folder. A run whose file says ``running`` while nothing holds its folder was killed
without any chance to write.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import open_regular, read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import LOCK_FILE, taken

STATE_FILE = "run_state.json"

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


def write_state(dump_folder: str | Path, state: str, why: str = "") -> None:
    """Record a run's state; a disk without space or the right to write leaves the old record.

    A failure replaces neither of the ends "finished" and "stopped": training that began after them
    has recorded "running".

    Args:
        dump_folder: ``job.dump_folder``; nothing is written if it does not exist.
        state: One of the states above.
        why: The cause, in one line.
    """
    path = Path(dump_folder) / STATE_FILE
    before = read_state(dump_folder)
    if state == FAILED and before is not None and before["state"] in (FINISHED, STOPPED):
        return
    record = {"state": state, "why": why, "since": f"{datetime.now().astimezone():%F %T %z}"}
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        scratch.write_text(json.dumps(record) + "\n")
        scratch.replace(path)


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
