# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Two network namespaces as two machines, with a limited link between them, and a run on both.

It needs root and iproute2. Each namespace has one rank, a process of the trainer.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.scaling.experiments import last_error, step_records

DEVICE = "slow0"
"""Device name of both ends of the link."""

ADDRESSES = ("10.91.0.1", "10.91.0.2")
"""Addresses of the two ends."""


class NotPermittedError(RuntimeError):
    """This machine does not permit network namespaces."""


@contextmanager
def slow_link(mbit: float) -> Iterator[list[str]]:
    """Connect two new network namespaces by a link whose ends are limited by a token bucket.

    Args:
        mbit: Rate in either direction, Mbit/s.

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
            bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "200ms")
            limit = ("tc", "qdisc", "add", "dev", DEVICE, "root", *bucket)
            _call("ip", "netns", "exec", name, *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().replace("\n", " ")
        raise NotPermittedError(f"{' '.join(command)}: {reason}")


def train_between(
    ends: list[str], arguments: list[str], timeout: float, folder: Path
) -> list[dict[str, Any]]:
    """Train one rank in each namespace.

    Args:
        ends: The namespaces.
        arguments: Of the run.
        timeout: Seconds to wait for each rank.
        folder: The run's dump folder.

    Returns:
        Rank 0's records of the logged steps without the first fifth, which opens connections.

    Raises:
        RunFailedError: A rank failed.
        subprocess.TimeoutExpired: A rank has not ended.
    """
    program = [sys.executable, "-m", "torchtitan_lr.train", f"--job.dump_folder={folder}"]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as files:
        # Files, not pipes: a pipe would fill up while the script waits for the other rank.
        logs = [Path(temporary) / f"rank{rank}.err" for rank in range(len(ends))]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *program, *arguments],
                env=os.environ | _environment(rank),
                stdout=subprocess.DEVNULL,
                stderr=files.enter_context(logs[rank].open("w")),
            )
            for rank, name in enumerate(ends)
        ]
        try:
            for process in ranks:
                process.wait(timeout=timeout)
        finally:
            for process in ranks:
                process.kill()
        for process, log in zip(ranks, logs, strict=True):
            if process.returncode:
                raise RunFailedError(last_error(log.read_text(), process.returncode))
    records = step_records(folder)
    return records[len(records) // 5 :]


def _environment(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29531",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
