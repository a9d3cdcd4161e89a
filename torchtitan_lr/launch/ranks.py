# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ranks of this machine: where they meet those of others, and how they run to their end.

torchrun's ``--standalone`` listens on all interfaces and unpickles the data it receives. The store
of one machine is one that other machines cannot reach. One of several machines, that of
``RDZV_ENDPOINT``, opens the store by which all meet; without it a run ends, and the same command
resumes it.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan_lr.compat.elastic import Agent, Failure
from torchtitan_lr.launch import placement
from torchtitan_lr.launch.processes import Signals
from torchtitan_lr.launch.run_folder import AGAIN_THE_SAME, EXIT_STATUS, LOST

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

DEFAULT_PORT = 29400
"""torchrun's port where ``RDZV_ENDPOINT`` has none."""


def served_store(listener: socket.socket, seconds: int = 900) -> TCPStore:
    """Serve a store on a bound socket: TCPStore's own would bind to all interfaces."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one machine, whose ranks connect to a store of each start."""

    def __init__(self) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, "none", 900)

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store and return at once: there are no other machines."""
        self._store = served_store(socket.create_server((LOOPBACK, 0)))
        self.master_port = self._store.port
        return super().next_rendezvous()


def meeting(environment: placement.Environment) -> RendezvousHandler:
    """Return where the machines of a run meet."""
    if environment.nodes == 1:
        return LoopbackRendezvous()
    host, port = parse_rendezvous_endpoint(environment.endpoint, DEFAULT_PORT)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Debian's /etc/hosts has such an address for a machine's own name: others cannot reach it.
    loopback = ipaddress.ip_address(address[0]).is_loopback
    named = loopback and host != address[0] and "localhost" not in host.lower()
    parts = os.environ.get("RDZV_CONF", "").split(",")  # KEY=NUMBER,... of torchrun
    settings = dict(part.split("=", 1) for part in parts if part)
    seconds = int(settings.get("read_timeout", 60))
    store = shared_store(family, address, "" if named else str(address[0]), seconds)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=environment.endpoint,
        run_id=os.environ.get("RDZV_ID") or "torchtitan_lr",
        min_nodes=environment.min_nodes or environment.nodes,
        max_nodes=environment.nodes,
        local_addr=None if named else local_address(family, address),
        **settings,
    )
    return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)


def shared_store(family: int, address: Any, where: str, seconds: int) -> TCPStore:
    """Serve the store of several machines at `where`, or connect to it.

    The port decides which, as one process alone can bind it: torchrun decides by the machine's
    names, and two launchers of one machine would both serve.
    """
    with contextlib.suppress(OSError):  # another machine's address, or another launcher serves
        return served_store(socket.create_server((where, address[1]), family=family), seconds)
    end = time.monotonic() + seconds
    while True:  # a store's own wait hears no signal, and prints its stack at each try
        try:
            socket.create_connection(address[:2], timeout=1).close()
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(f"nobody answers within {seconds} s ({error})") from error
            time.sleep(0.2)
    return TCPStore(address[0], address[1], is_master=False, timeout=timedelta(seconds=seconds))


def local_address(family: int, there: Any) -> str:
    """Return this machine's address on the way to another one; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def run_ranks(
    environment: placement.Environment,
    command: Sequence[str],  # the module that every rank runs, and its arguments
    log_folder: Path,
    variables: Mapping[str, str],  # beside this process's
    shown: Collection[int] = (),  # by their number on this machine
    signals: Signals | None = None,  # without it they raise their exceptions here
) -> tuple[bool, Failure | None]:
    """Run the ranks of this machine; return whether rank 0 is one, and why they failed."""
    if "LOGLEVEL" not in os.environ:  # torchrun's words, which repeat what the caller says
        torchrun = logging.getLogger("torch.distributed.elastic")
        torchrun.addHandler(logging.NullHandler())
        torchrun.propagate = False
    ranks = 1 if environment.comm_mode else environment.ranks
    before, given = dict(os.environ), dict(variables)
    if environment.nodes == 1:  # gloo listens, and unpickles what it receives
        given["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or _LOOPBACK_INTERFACE
    filtered = set(shown) or {-1}  # an empty filter would show all
    logs = DefaultLogsSpecs(str(log_folder), tee=Std.ALL, local_ranks_filter=filtered)
    try:
        os.environ.update(given)
        rendezvous = meeting(environment)
        needs_gpus = placement.GPUS_VARIABLE in variables
        lost = partial(placement.lost_devices, ranks) if needs_gpus else str
        ends = environment.max_restarts, AGAIN_THE_SAME, lost, EXIT_STATUS[LOST]
        agent = Agent(command, ranks, rendezvous, logs, *ends)
        if signals is not None:
            signals.agent = agent
        result = agent.run()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if environment.nodes > 1:
            what = f"the machine of RDZV_ENDPOINT cannot be reached, or the run ended there; {what}"
        return False, Failure(None, None, what, log_folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    failure = None if result is None or not result.is_failed() else agent.failure
    if result is None:
        failure = Failure(None, None, "the machines are complete without this one", log_folder)
    # The others need not wait for this machine. Without a device that it lost they may go on.
    if failure is None or failure.status not in AGAIN_THE_SAME:
        with contextlib.suppress(Exception):
            rendezvous.shutdown()
    return agent.first_rank == 0, failure
