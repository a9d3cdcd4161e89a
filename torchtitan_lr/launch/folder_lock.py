# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One job per dump folder: two jobs would mix their metrics and delete each other's checkpoints.

The kernel releases the lock (``flock``) when its process ends for any reason. The file ``run.lock``
remains and records the last holder. On one machine the launcher takes the lock before any rank
starts, otherwise rank 0 does. On NFS a lock holds between machines if the server's lock service
runs; with the mount options ``nolock`` or ``local_lock``, each machine sees only its own locks.
There rank 0 compares the recorded holder with itself before it writes a save or a metric: the start
that signed last goes on, and an earlier one ends without writing. So does a run whose ``run.lock``
was deleted, since nothing keeps another start out of its folder any more.
"""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError

LOCK_FILE = "run.lock"

HELD_VARIABLE = "TORCHTITAN_LR_LOCKED"
"""Environment variable of the ranks: the dump folder that the launcher has locked."""

SIGNATURE_VARIABLE = "TORCHTITAN_LR_LOCK"
"""Environment variable of the ranks: what the launcher has written into ``run.lock``."""

StillOurs = Callable[[], None]
"""Raises a ConfigError if another start has taken the folder, or could take it."""


@dataclass(frozen=True)
class FolderLock:
    """The lock of a start; calling it checks that the folder is still this start's.

    Args:
        dump_folder: ``job.dump_folder``.
        signature: The line that this start has written into ``run.lock``.
    """

    dump_folder: str
    signature: str

    def __call__(self) -> None:
        """Raise a ConfigError if the lock's file is gone, or another start has signed it."""
        path = Path(self.dump_folder) / LOCK_FILE
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            want = f"a folder whose {LOCK_FILE} stays: it was deleted, and another run may start "
            want += "there, so this one ends without writing; run the same command to resume"
            raise ConfigError("job.dump_folder", self.dump_folder, want) from None
        except OSError:  # a file server that does not answer proves nothing
            return
        if found not in (self.signature.encode(), b""):  # a start that signs has emptied it before
            raise taken(self.dump_folder)


@contextmanager
def locked(dump_folder: str) -> Iterator[FolderLock]:
    """Lock a job's dump folder, which is created if needed.

    Yields:
        What checks that the folder is still this start's.

    Raises:
        ConfigError: Another job uses the folder, or the folder is not writable.
    """
    path = Path(dump_folder) / LOCK_FILE
    with ExitStack() as until:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = until.enter_context(path.open("ab", buffering=0))
            try:
                lock_file(file, path)
            except BlockingIOError:
                # Listing runs holds each lock for an instant (`run_state.is_held`): try twice.
                time.sleep(0.05)
                lock_file(file, path)
            since = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            signature = json.dumps(who)
            file.truncate(0)
            file.write(signature.encode())
        except BlockingIOError:
            raise taken(dump_folder) from None
        except OSError as error:
            want = f"a folder in which {path} can be written ({error.strerror})"
            raise ConfigError("job.dump_folder", dump_folder, want) from error
        yield FolderLock(dump_folder, signature)


@contextmanager
def locked_by_rank(dump_folder: str, variables: Mapping[str, str]) -> Iterator[StillOurs]:
    """Lock the dump folder on rank 0, unless the launcher has locked it.

    Args:
        dump_folder: ``job.dump_folder``.
        variables: The rank's environment.

    Yields:
        As `locked`, also of the launcher's lock; what does nothing on other ranks.

    Raises:
        ConfigError: As for `locked`.
    """
    if variables.get("RANK", "0") != "0":
        yield lambda: None
        return
    if variables.get(HELD_VARIABLE) == os.path.realpath(dump_folder):
        yield FolderLock(dump_folder, variables[SIGNATURE_VARIABLE])
        return
    with locked(dump_folder) as check:
        yield check


def lock_file(file: IO[Any], path: Path) -> None:
    """Lock a file until it is closed, or warn that this file system cannot.

    Args:
        file: The file, open for writing; processes that inherit it keep the lock.
        path: Its path, for the warning.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        print(
            f"warning: {path} cannot be locked ({error.strerror}): make sure that no other job "
            "uses this folder",
            file=sys.stderr,
        )


def taken(dump_folder: str) -> ConfigError:
    """Return the error of a folder that another job uses, with its holder."""
    try:
        who = read_json(Path(dump_folder) / LOCK_FILE)
        holder = f"process {who['pid']} on {who['host']} has used it since {who['since']}"
    except (OSError, ValueError, KeyError):
        holder = "its holder is not recorded yet"  # between locking and signing
    want = f"a folder that no other job uses; {holder}"
    return ConfigError("job.dump_folder", dump_folder, want)
