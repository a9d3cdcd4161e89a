# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Groups of gloo on an address of their own, whose connections can be closed while they are used.

Tested with torch 2.11 and 2.13.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Endpoint = tuple[str, int]
"""Address and port."""


def gloo_group(
    store: dist.Store, rank: int, ranks: int, timeout: timedelta, address: str
) -> tuple[dist.ProcessGroup, "GlooConnections"]:
    """Return a group of gloo that listens on one address, whatever ``GLOO_SOCKET_IFNAME`` says.

    torch has no public way to give a group its address, or to make one outside the default group.
    ``ProcessGroupGloo._Options``, ``ProcessGroup._set_default_backend`` and ``_register_backend``
    are used; if one is renamed, this raises an AttributeError.

    Args:
        store: By which the ranks meet.
        rank: This one.
        ranks: Their number.
        timeout: Of a collective.
        address: Of this machine.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know no options
    options = gloo._Options()
    options._timeout = timeout
    earlier = _listening()
    options._devices = [gloo.create_device(hostname=address)]
    own = _listening() - earlier
    store.set(f"listening/{rank}", json.dumps(sorted(own)))
    backend = gloo(store, rank, ranks, options)
    group = dist.ProcessGroup(store, rank, ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    others = [json.loads(store.get(f"listening/{r}")) for r in range(ranks) if r != rank]
    return group, GlooConnections(own, {(host, port) for ends in others for host, port in ends})


class GlooConnections:
    """The connections of one group to its other ranks.

    torch's ``abort`` leaves gloo's connections open: a rank that waits for one that has given up
    waits until the timeout. Of two ranks either may have connected, so that a connection has the
    port of one's device at this end or of the other's at that end.
    """

    def __init__(self, own: set[Endpoint], others: set[Endpoint]) -> None:
        self._own, self._others = own, others

    def shut(self) -> None:
        """End them: collectives under way fail at both ends, and none can start."""
        for connection in _sockets():
            with contextlib.suppress(OSError):  # not connected
                ends = connection.getsockname()[:2], connection.getpeername()[:2]
                if ends[0] in self._own or ends[1] in self._others:
                    connection.shutdown(socket.SHUT_RDWR)


def _listening() -> set[Endpoint]:
    """Return where this process listens."""
    return {
        opened.getsockname()[:2]
        for opened in _sockets()
        if opened.family in (socket.AF_INET, socket.AF_INET6)
        and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _sockets() -> Iterator[socket.socket]:
    """Yield a copy of each socket of this process; a copy stays the same one while it is used."""
    for name in os.listdir("/dev/fd"):
        descriptor = None
        try:
            descriptor = os.dup(int(name))
            opened = socket.socket(fileno=descriptor)
        except OSError:  # closed meanwhile, or no socket
            if descriptor is not None:
                os.close(descriptor)
            continue
        with opened:
            yield opened
