# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Processes by /proc."""

import contextlib
from pathlib import Path


def child_pids(parent: int) -> list[int]:
    """Return the living children of a process, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name in parentheses may itself hold blanks and parentheses.
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def process_state(pid: int) -> str:
    """Return the letter that ``ps`` shows, such as ``T`` where it is stopped; "" for no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
