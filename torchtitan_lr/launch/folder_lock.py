# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One job per dump folder: two would mix their metrics and delete each other's checkpoints.

The lock is the kernel's (``flock``), so it ends with its process, however that ends; the file
``run.lock`` stays and only says who holds or held it. The launcher of one machine takes it before
any rank starts, else rank 0 does. On NFS a lock holds between machines where the server's lock
service runs; mounted with ``nolock`` or ``local_lock``, each machine sees its own locks only.
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.errors import ConfigError

LOCK_FILE = "run.lock"

HELD_VARIABLE = "TORCHTITAN_LR_LOCKED"
"""Environment variable of ranks: the dump folder that their launcher has locked."""


@contextmanager
def locked(dump_folder: str) -> Iterator[None]:
    """Hold a job's dump folder, which is made if needed.

    Args:
        dump_folder: ``job.dump_folder``.

    Raises:
        ConfigError: Another job is at work there, or the folder takes no file.
    """
    path = Path(dump_folder) / LOCK_FILE
    with ExitStack() as open_file:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open_file.enter_context(path.open("ab", buffering=0))
            lock_file(file, path)
            _sign(file)
        except BlockingIOError:
            want = f"a folder in which no other job is at work; {_holder(path)}"
            raise ConfigError("job.dump_folder", dump_folder, want) from None
        except OSError as error:
            want = f"a folder in which {path} can be written ({error.strerror})"
            raise ConfigError("job.dump_folder", dump_folder, want) from error
        yield


@contextmanager
def locked_by_rank(dump_folder: str, variables: Mapping[str, str]) -> Iterator[None]:
    """Hold it on rank 0, unless the launcher does.

    Args:
        dump_folder: ``job.dump_folder``.
        variables: The rank's environment.

    Raises:
        ConfigError: As `locked`.
    """
    by_launcher = variables.get(HELD_VARIABLE) == os.path.realpath(dump_folder)
    if by_launcher or variables.get("RANK", "0") != "0":
        yield
        return
    with locked(dump_folder):
        yield


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
            f"warning: {path} cannot be locked ({error.strerror}): see to it that no other job "
            "uses this folder",
            file=sys.stderr,
        )


def _sign(file: IO[bytes]) -> None:
    """Writes who holds the lock, for the one who comes second."""
    since = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    file.truncate(0)
    file.write(json.dumps(who).encode())


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text())
        return f"process {who['pid']} on {who['host']} has been since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "who holds it is not written yet"  # between locking and signing
