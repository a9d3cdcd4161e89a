# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where the ranks of a run meet: on one machine, or on several.

torchrun's ``--standalone`` listens on all interfaces and unpickles the data it receives. The store
of one machine is one that other machines cannot reach. One of several machines, that of
``RDZV_ENDPOINT``, opens the store by which all meet; without it a run ends, and the same command
resumes it.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan_lr.launch.environment import Environment

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

DEFAULT_PORT = 29400
"""torchrun's port where ``RDZV_ENDPOINT`` has none."""

_ELSEWHERE = ("198.51.100.1", 9)  # reserved for documentation (RFC 5737): the default route

_SIOCGIFADDR = 0x8915  # of Linux's <bits/ioctls.h>


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


def loopback_store() -> TCPStore:
    """Serve a store on a free port of the loopback interface."""
    return served_store(socket.create_server((LOOPBACK, 0)))


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one machine, whose ranks connect to a `loopback_store` of each start."""

    def __init__(self) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, "none", 900)

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store and return at once: there are no other machines."""
        self._store = loopback_store()
        self.master_port = self._store.port
        return super().next_rendezvous()


def meeting(environment: Environment) -> tuple[RendezvousHandler, dict[str, str]]:
    """Return where the machines of a run meet, and the variables that name gloo's interface.

    Ranks unpickle what gloo receives, so those of one machine use its loopback interface. Ranks of
    several use the one that leads to the endpoint; that of a machine's name need not do so.

    Raises:
        OSError: The endpoint's name is unknown.
        RuntimeError: Nobody answers there.
    """
    if environment.nodes == 1:
        return LoopbackRendezvous(), {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE}
    host, port = parse_rendezvous_endpoint(environment.endpoint, DEFAULT_PORT)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    local = local_address(family, address)
    if is_own_name(host, str(address[0])):
        with contextlib.suppress(OSError):  # no route: there are no other machines
            local = local_address(socket.AF_INET, _ELSEWHERE)
    settings = dict(environment.rdzv_settings)
    hosts = {"0": False, "1": True}.get(settings.pop("is_host", ""))
    store = shared_store(host, port, int(settings.get("read_timeout", 60)), hosts)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=environment.endpoint,
        run_id=os.environ.get("RDZV_ID") or "torchtitan_lr",
        min_nodes=environment.min_nodes or environment.nodes,
        max_nodes=environment.nodes,
        local_addr=local,
        **settings,
    )
    handler = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    interface = interface_of(local)
    return handler, {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}


def shared_store(host: str, port: int, seconds: int, hosts: bool | None = None) -> TCPStore:
    """Serve the store of several machines, or connect to it.

    The port decides which, as one process alone can bind it: torchrun decides by the machine's
    names, and two launchers of one machine would both serve. ``hosts`` overrides the decision.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    named = is_own_name(host, str(address[0]))
    if hosts is not False:
        with contextlib.suppress(OSError):  # another machine's address, or another launcher serves
            where = "" if named or hosts else address[0]
            return served_store(socket.create_server((where, port), family=family), seconds)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


def is_own_name(host: str, address: str) -> bool:
    """Return whether this machine's own name means an address that the others cannot reach."""
    loopback = ipaddress.ip_address(address).is_loopback
    return loopback and host != address and "localhost" not in host.lower()


def local_address(family: int, there: Any) -> str:
    """Return this machine's address on the way to another one; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address; None elsewhere than on Linux."""
    for _, name in socket.if_nameindex() if sys.platform == "linux" else []:
        request = struct.pack("256s", name.encode())
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with probe, contextlib.suppress(OSError):  # an interface without an address
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
