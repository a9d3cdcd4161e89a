# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The sockets of a process."""

import contextlib
import os
import socket
from ipaddress import ip_address
from pathlib import Path

LISTENING = "0A"


def listening(pid):
    """Addresses of the TCP sockets on which a process waits for connections."""
    inodes, found = set(), []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                # Each 32-bit word is written in the machine's own order.
                swapped = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                found.append(ip_address(b"".join(swapped)))
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
