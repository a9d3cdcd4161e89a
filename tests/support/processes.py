# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Processes and their sockets by /proc."""

import contextlib
import multiprocessing
import os
import socket
from ipaddress import ip_address
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


def listening(pid):
    """Addresses of the TCP sockets on which a process waits for connections."""
    inodes, found = set(), []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: it listens
                words = bytes.fromhex(fields[1].partition(":")[0])
                # Each 32-bit word is written in the machine's own order.
                swapped = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                found.append(ip_address(b"".join(swapped)))
    return found


def in_child(function):
    """Call a function in a fork. Return its exit code when no process of it lives."""
    context = multiprocessing.get_context("fork")
    left, held = context.Pipe(duplex=False)
    child = context.Process(target=function)
    child.start()
    held.close()
    child.join(60)
    assert left.poll(10)  # all that inherited the other end have closed it
    return child.exitcode


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
