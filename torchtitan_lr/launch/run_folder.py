# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Who has a dump folder, ``run.lock``, and how its run ended, ``run_state.json``; without torch.

One job has a folder: two would mix their metrics and delete each other's checkpoints. The kernel
releases the lock (``flock``) when its process ends for any reason. The file remains and names the
last holder. On one machine the launcher takes the lock, otherwise rank 0 does.

Rank 0 writes the state when training starts and ends, one of the first ranks to fail when it fails,
and the launcher where no rank could. A start that is refused, or ends before training, leaves
the record of the run in the folder. A run whose file says ``running`` while nothing holds its
folder was killed without any chance to write.
"""

import fcntl
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.config.files import open_regular, read_json
from torchtitan_lr.errors import ConfigError, require

LOCK_FILE = "run.lock"

_SEEN_SECONDS = 60.0  # until a network's file system shows what another machine wrote

HELD_VARIABLE = "TORCHTITAN_LR_LOCK"
"""Environment variable of the ranks whose launcher has checked the run: what `locked` returned."""

STATE_FILE = "run_state.json"

RUNNING = "running"
FINISHED, STOPPED = ENDS = ("finished", "stopped")
FAILED, REFUSED, DIVERGED, LOST = FAILURES = ("failed", "refused", "diverged", "lost")

EXIT_STATUS = {FINISHED: 0, STOPPED: 0, FAILED: 1, REFUSED: 2, DIVERGED: 3, LOST: 4}
"""Exit status of a rank, and of the launcher, by the run's end."""

AGAIN_THE_SAME = (EXIT_STATUS[REFUSED], EXIT_STATUS[DIVERGED], EXIT_STATUS[LOST])
"""Exit statuses of ends to which a restart on the same machine would come again."""


@contextmanager
def locked(dump_folder: str) -> Iterator[str]:
    """Lock a job's dump folder, which is created if needed; return the signature in its lock."""
    path = Path(dump_folder) / LOCK_FILE
    with ExitStack() as until:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = until.enter_context(path.open("ab", buffering=0))
            try:
                lock_file(file, path)
            except BlockingIOError:
                # Listing runs holds each lock for an instant (`is_held`): try twice.
                time.sleep(0.05)
                lock_file(file, path)
            since = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            signed = json.dumps(who)
            file.truncate(0)
            file.write(signed.encode())
            os.fsync(file.fileno())  # ranks on other machines read it
        except BlockingIOError:
            raise taken(dump_folder) from None
        except OSError as error:
            want = f"a folder in which {path} can be written ({error.strerror})"
            raise ConfigError("job.dump_folder", dump_folder, want) from error
        yield signed


def check_ours(dump_folder: str, signed: str) -> None:
    """Raise a ConfigError if a folder was emptied, or locked again, since it was locked."""
    try:
        found = (Path(dump_folder) / LOCK_FILE).read_bytes()
    except FileNotFoundError:
        found = b"none"
    except OSError:  # of a network's file system, for a while
        return
    want = f"a folder whose {LOCK_FILE} stays: another run may write there, and this one ends"
    is_ours = found in (signed.encode(), b"")  # empty: it is being signed
    require(is_ours, "job.dump_folder", dump_folder, f"{want} before its save")


def check_shared(dump_folder: str, signed: str) -> None:
    """Raise a ConfigError on a machine whose dump folder is not the one that rank 0 has locked."""
    path, end = Path(dump_folder) / LOCK_FILE, time.monotonic() + _SEEN_SECONDS
    while True:
        found = ""
        with suppress(OSError):
            os.listdir(path.parent)  # a network's file system then asks its server again
            found = path.read_text()
        if found == signed:
            return
        if time.monotonic() > end:
            here = f"{socket.gethostname()} has another {LOCK_FILE}"
            want = f"a folder that all machines share, and no other run: {here}"
            raise ConfigError("job.dump_folder", dump_folder, want)
        time.sleep(0.1)


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


def lock_file(file: IO[Any], path: Path) -> None:
    """Lock a file until it is closed, or warn that this file system cannot.

    Processes that inherit the open file keep the lock; a BlockingIOError tells that another has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        what = f"{path} cannot be locked ({error.strerror})"
        print(f"warning: {what}: let no other job use this folder", file=sys.stderr)


def taken(dump_folder: str) -> ConfigError:
    """Return the error of a folder that another job uses, with its holder."""
    try:
        who = read_json(Path(dump_folder) / LOCK_FILE)
        holder = f"process {who['pid']} on {who['host']} has used it since {who['since']}"
    except (OSError, ValueError, KeyError):
        holder = "its holder is not recorded yet"  # between locking and signing
    want = f"a folder that no other job uses; {holder}"
    return ConfigError("job.dump_folder", dump_folder, want)


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
    with suppress(OSError):
        scratch.write_text(json.dumps(record) + "\n")
        scratch.replace(path)


def read_state(dump_folder: str | Path) -> dict[str, Any] | None:
    """Return what `write_state` recorded, None without a readable record."""
    try:
        record = read_json(Path(dump_folder) / STATE_FILE)
    except (OSError, ValueError):
        return None
    return record if isinstance(record.get("state"), str) else None
