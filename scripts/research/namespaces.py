# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Two network namespaces as two machines, with a link between them that can be slowed.

It needs root and iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

DEVICE = "slow0"
"""Device name of both ends of the link."""

ADDRESSES = ("10.91.0.1", "10.91.0.2")
"""Addresses of the two ends."""


class NotPermittedError(RuntimeError):
    """This machine does not permit network namespaces."""


@contextmanager
def two_machines() -> Iterator[list[str]]:
    """Connect two new network namespaces by a link.

    Yields:
        The names of the namespaces; they have `ADDRESSES` on `DEVICE`.

    Raises:
        NotPermittedError: The tools are missing or the kernel refuses.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotPermittedError(f"{tool} (iproute2) is not installed")
    names = [f"lr{os.getpid()}-{end}" for end in range(2)]
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        first, second = names
        link = ("link", "add", "name", DEVICE, "netns", first, "type", "veth")
        _call("ip", *link, "peer", "name", DEVICE, "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _call(*inside, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def limit(namespace: str, mbit: float, delay_ms: float = 0) -> None:
    """Limit what a namespace sends, by a token bucket.

    Args:
        namespace: Its name.
        mbit: Rate, Mbit/s.
        delay_ms: Additional delay, ms.

    Raises:
        NotPermittedError: The kernel refuses.
    """
    tc = ("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", DEVICE)
    bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "200ms")
    _call(*tc, "root", "handle", "1:", *bucket)
    if delay_ms:
        _call(*tc, "parent", "1:", "handle", "2:", "netem", "delay", f"{delay_ms}ms")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().replace("\n", " ")
        raise NotPermittedError(f"{' '.join(command)}: {reason}")
