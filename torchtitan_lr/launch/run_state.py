# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``run_state.json`` in the dump folder: how a run ended, where and why. Needs no torch.

Rank 0 writes it when training starts and ends, and the rank that fails first when it fails; the
launcher writes it where no rank could. A start that is refused, or ends before training, leaves
the record of the run in the folder. A run whose file says ``running`` while nothing holds its
folder was killed without any chance to write.
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import read_json

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
    if state in FAILURES and before is not None:
        when = before.get("time")
        is_since = isinstance(when, int | float) and when >= began
        if before["state"] in ENDS or (before["state"] in FAILURES and is_since):
            return
    record = {"state": state, "rank": rank, "step": step, "error": error, "time": time.time()}
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
