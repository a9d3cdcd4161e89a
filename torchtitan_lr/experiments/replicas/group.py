# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The process group of the replicas that take part in a step; needs torchft.

It is a gloo group that is built anew whenever a replica joins or leaves. Each rank of a replica has
its own, with the ranks of the same number in the other replicas.

A collective that fails marks the whole step as lost: this replica closes its connections, so that
no other waits for it until the timeout, and its later calls do nothing. No call raises. The step
goes on with undefined sums up to the vote, which discards it: the ranks of one replica thus make
the same calls to one another, whichever of them has lost a sum.

gloo ends the process that receives more than it expects. Members therefore compare their runs
(`membership`) before the first collective of a group.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import ProcessGroupGloo
from torchft.process_group import create_store_client

from torchtitan_lr.titan import logger

Endpoint = tuple[str, int]
"""Address and port."""


class LostReplicaError(RuntimeError):
    """A collective of this step failed: a replica has left, hangs, or aborted the step."""


class ReplicaGroup(ProcessGroupGloo):
    """A gloo group over the replicas of the present quorum.

    Args:
        timeout: Of a collective.
        address: Of this machine.
        card: Returns what the other members must know of this replica; JSON.

    Attributes:
        replicas: Ids of the replicas that take part, in the order of their ranks.
        place: This replica's rank in the group.
        generation: Number of the quorum; another one after every change of the members.
        cards: Of all members, in the same order.
        failure: Why a collective of this generation failed; None until one does.
        bytes_sent: Bytes of the tensors given to all-reduces and broadcasts so far.
    """

    def __init__(
        self, timeout: timedelta, address: str, card: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(timeout=timeout)
        self.limit, self.address, self._card = timeout, address, card
        self.replicas: list[int] = []
        self.cards: list[dict[str, Any]] = []
        self.place, self.generation, self.bytes_sent = 0, -1, 0
        self.failure: Exception | None = None
        self._store: Any = None
        self._listens: set[Endpoint] = set()

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Connect the members of a new quorum; torchft's manager calls this.

        Of its arguments ``store_addr`` is host:port and prefix of the members' store, the ranks of
        ``group_*`` are those of this replica, and the global ranks number all ranks of all members.
        """
        self.failure, self.cards = None, []
        self.place, self.generation = rank, quorum_id or 0
        self.replicas = [number // (group_world_size or 1) for number in global_ranks or [0]]
        self.abort(errored=False)
        self._store = create_store_client(store_addr, timeout=self.limit)
        # torchft's own would listen on any interface.
        self._pg, self._listens = gloo_group(
            self._store, rank, world_size, self.limit, self.address
        )
        self.cards = self.exchange("card", {"listens": sorted(self._listens), **self._card()})

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return all members' JSON values of a name, which is used once per quorum.

        Raises:
            LostReplicaError: A member has left, or did not give its value in time.
        """
        try:
            self._store.set(f"{name}/{self.place}", json.dumps(value))
            return [json.loads(self._store.get(f"{name}/{n}")) for n in range(len(self.replicas))]
        except (RuntimeError, ValueError) as error:  # torch's errors of a store are RuntimeErrors
            self.lose(error)
            raise LostReplicaError(str(error)) from error

    def errored(self) -> Exception | None:
        """Return why this step is lost; torchft's manager then votes against a commit."""
        return self.failure

    def lose(self, error: Exception) -> None:
        """Mark the step as lost and close the connections, at which the other members notice.

        torch's ``abort`` leaves gloo's connections open: a member that waits for one that has given
        up would wait until the timeout. Of two members either may have connected, so that a
        connection has the port of one's device at this end or of the other's at that end.
        """
        if self.failure is not None:
            return
        self.failure = error
        logger.info("Collective of quorum %d failed: %s", self.generation, error)
        others = {tuple(end) for card in self.cards for end in card["listens"]} - self._listens
        for connection in _sockets():
            with contextlib.suppress(OSError):  # not connected
                ends = connection.getsockname()[:2], connection.getpeername()[:2]
                if ends[0] in self._listens or ends[1] in others:
                    connection.shutdown(socket.SHUT_RDWR)
        self.abort()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Start an all-reduce; neither this nor waiting for it raises."""
        return GuardedWork(self, super().allreduce, tensors, opts)

    def broadcast(self, tensor_list: list[Tensor], opts: Any) -> Any:
        """Start a broadcast; neither this nor waiting for it raises."""
        return GuardedWork(self, super().broadcast, tensor_list, opts)


class GuardedWork:
    """A collective under way, or none after a failure; the group's ``failure`` says which."""

    def __init__(
        self, group: ReplicaGroup, start: Callable[..., Any], tensors: list[Tensor], opts: Any
    ) -> None:
        self._group, self._work = group, None
        if group.failure is None:
            group.bytes_sent += sum(tensor.nbytes for tensor in tensors)
            try:
                self._work = start(tensors, opts)
            except Exception as error:
                group.lose(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; the group's ``failure`` says whether there is a result."""
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:
            self._group.lose(error)
        return True


def gloo_group(
    store: dist.Store, rank: int, ranks: int, timeout: timedelta, address: str
) -> tuple[dist.ProcessGroup, set[Endpoint]]:
    """Return a group of gloo that listens on one address, whatever ``GLOO_SOCKET_IFNAME`` says.

    torch has no public way to give a group its address, or to make one outside the default group.
    ``ProcessGroupGloo._Options``, ``ProcessGroup._set_default_backend`` and ``_register_backend``
    are used; if one is renamed, this raises an AttributeError.

    Returns:
        The group, whose ranks meet by ``store``, and where it listens.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know no options
    options = gloo._Options()
    options._timeout = timeout
    earlier = _listening()
    options._devices = [gloo.create_device(hostname=address)]
    listens = _listening() - earlier
    group = dist.ProcessGroup(store, rank, ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = gloo(store, rank, ranks, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group, listens


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
