# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a fault strikes, and the files by which a check and its replicas speak of it.

A check writes an order; the replica reads it at the start of a step, leaves a note when it strikes,
and sends itself the signal. The product's code knows nothing of it.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEFORE = "before collective"
"""A collective of a step is about to start."""

DURING = "in collective"
"""It has started, and nothing has waited for it."""

VOTE = "before the vote"
"""All collectives of the step have succeeded."""

COMMITTED = "after the vote"
"""The replica has committed the step and has not updated a weight."""

COMPARISON = "in the comparison"
"""The members of a new quorum compare their configurations."""

HEAL = "in the heal"
"""A newcomer has fetched a state and has not loaded it."""

PLAIN, REFRESH = "plain", "refresh"


@dataclass(frozen=True)
class Strike:
    """A signal that a replica sends to itself.

    Attributes:
        signal: ``SIGKILL`` or ``SIGSTOP``.
        point: One of the points of this module.
        kind: `PLAIN` or `REFRESH`: of the step that is struck.
        index: Number of the collective in the step, from 0.
        step: The first step that may be struck.
    """

    signal: str
    point: str
    kind: str = PLAIN
    index: int = 0
    step: int = 0

    def is_due(self, step: int, interval: int) -> bool:
        """Return whether a step is struck.

        Args:
            step: The step, from 1.
            interval: Steps between refreshes.
        """
        return step >= self.step and (step % interval == 1 % interval) == (self.kind == REFRESH)


def order(folder: Path, replica: int, strike: Strike | None) -> None:
    """Give a replica an order, or take it back.

    Args:
        folder: Folder of orders and notes.
        replica: The replica.
        strike: The order; None for none.
    """
    path = folder / f"order_{replica}.json"
    if strike is None:
        path.unlink(missing_ok=True)
        return
    path.with_suffix(".new").write_text(json.dumps(asdict(strike)))
    path.with_suffix(".new").rename(path)  # a reader finds all of it or none


def ordered(folder: Path, replica: int) -> Strike | None:
    """Return a replica's order, None without one."""
    path = folder / f"order_{replica}.json"
    return Strike(**json.loads(path.read_text())) if path.is_file() else None


def note(folder: Path, replica: int, name: str, **values: Any) -> None:
    """Append a note with the time, in one write: the next thing may be a kill.

    Args:
        folder: Folder of orders and notes.
        replica: Who writes.
        name: What the note is about; there is one file for each replica and name.
        **values: The note.
    """
    line = json.dumps({"time": time.time(), **values}) + "\n"
    path = folder / f"{name}_{replica}.jsonl"
    end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(end, line.encode())
    os.close(end)


def notes(folder: Path, replica: int, name: str) -> list[dict[str, Any]]:
    """Return a replica's notes of one name, oldest first."""
    path = folder / f"{name}_{replica}.jsonl"
    found = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in found]


def sent_by(device: str, table: str) -> int:
    """Return the bytes that a network device has sent, Ethernet headers included.

    Args:
        device: Its name.
        table: The text of ``/proc/net/dev``.

    Raises:
        KeyError: There is no such device.
    """
    rows = (line.partition(":") for line in table.splitlines())
    sent: Mapping[str, int] = {
        name.strip(): int(counters.split()[8]) for name, colon, counters in rows if colon
    }
    return sent[device]
