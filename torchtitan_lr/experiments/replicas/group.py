# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The process group of the replicas that take part in a step; needs torchft.

It is a gloo group that is built anew whenever a replica joins or leaves. Each rank of a replica has
its own, with the ranks of the same number in the other replicas.

A collective that fails marks the whole step as lost: this replica closes its connections, so that
no other waits for it until the timeout, and its later calls do nothing. No call raises. The step
goes on with undefined sums up to the vote, which discards it: the ranks of one replica thus make
the same calls to one another, whichever of them has lost a sum.

gloo ends the process that receives more than it expects: another rank, schedule or batch gives
collectives of other sizes. Members therefore compare their runs before the first one of a group.
"""

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import ProcessGroupGloo

from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.titan import logger


class LostReplicaError(RuntimeError):
    """A collective of this step failed: a replica has left, hangs, or aborted the step."""


class ReplicaGroup(ProcessGroupGloo):
    """A gloo group over the replicas of the present quorum.

    Args:
        timeout: Of a collective.
        address: Of this machine.
        card: Returns what the other members must know of this replica; JSON.

    Attributes:
        cards: Of all members, in the order of their ranks.
        replicas: The members' ids, in this order.
        place: This replica's rank in the group.
        failure: Why a collective of this quorum failed; None until one does.
        bytes_sent: Bytes of the tensors given to all-reduces and broadcasts so far.
    """

    def __init__(
        self, timeout: timedelta, address: str, card: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(timeout=timeout)
        self.address, self._card = address, card
        self.replicas: list[int] = []
        self.cards: list[dict[str, Any]] = []
        self.place = self._count = self.bytes_sent = 0
        self.failure: Exception | None = None
        self._store: Any = None
        self._listens: set[tuple[str, int]] = set()

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        """Connect the members of a new quorum; torchft calls this with their store.

        torchft reports what this raises, and neither sends nor loads a state then.

        Raises:
            ConfigError: This replica must not take part (`check_members`).
            LostReplicaError: Another one must not, or has left: the step is tried again.
        """
        self.failure, self.cards, self._store = None, [], store
        self.place, self._count = rank, world_size
        # torchft's own group would listen on any interface.
        group, self._listens = gloo_group(store, rank, world_size, self._timeout, self.address)
        self.cards = self.exchange("card", {"listens": sorted(self._listens), **self._card()})
        self.replicas = [card["id"] for card in self.cards]
        check_members(self.cards, rank)
        return group

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return all members' JSON values of a name, which is used once per quorum.

        Raises:
            LostReplicaError: A member has left, or did not give its value in time.
        """
        try:
            self._store.set(f"{name}/{self.place}", json.dumps(value))
            return [json.loads(self._store.get(f"{name}/{n}")) for n in range(self._count)]
        except (RuntimeError, ValueError) as error:  # torch's errors of a store are RuntimeErrors
            self.report_error(error)
            raise LostReplicaError(str(error)) from error

    def errored(self) -> Exception | None:
        """Return why this step is lost; torchft's manager then votes against a commit."""
        return self.failure

    def report_error(self, error: Exception) -> None:
        """Mark the step as lost and close the connections, at which the other members notice.

        torch's ``abort`` leaves gloo's connections open: a member that waits for one that has given
        up would wait until the timeout. Of two members either may have connected, so that a
        connection has the port of one's device at this end or of the other's at that end.
        """
        if self.failure is not None:
            return
        self.failure = error
        logger.info("Collective of quorum %s failed: %s", self._quorum_id, error)
        others = {tuple(end) for card in self.cards for end in card["listens"]} - self._listens
        for connection in _sockets():
            with contextlib.suppress(OSError):  # not connected
                ends = connection.getsockname()[:2], connection.getpeername()[:2]
                if ends[0] in self._listens or ends[1] in others:
                    connection.shutdown(socket.SHUT_RDWR)
        self.abort()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Start an all-reduce; neither this nor waiting for it raises."""
        return self._guarded(super().allreduce, tensors, opts)

    def broadcast(self, tensor_list: list[Tensor], opts: Any) -> Any:
        """Start a broadcast; neither this nor waiting for it raises."""
        return self._guarded(super().broadcast, tensor_list, opts)

    def _guarded(self, start: Callable[..., Any], tensors: list[Tensor], opts: Any) -> Any:
        work = None
        if self.failure is None:
            self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
            try:
                work = start(tensors, opts)
            except Exception as error:
                self.report_error(error)
        return GuardedWork(self, work)


class GuardedWork(NamedTuple):
    """A collective under way, or none after a failure; the group's ``failure`` says which."""

    group: ReplicaGroup
    work: Any

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; the group's ``failure`` says whether there is a result."""
        try:
            if self.work is not None:
                self.work.wait()
        except Exception as error:
            self.group.report_error(error)
        return True


def check_members(cards: list[dict[str, Any]], place: int) -> None:
    """Compare all members with the one that has committed most steps since it started.

    Args:
        cards: Each with ``id``, ``commits``, and ``run``, what must be the same, by key.
        place: Of this replica.

    Raises:
        ConfigError: This replica is not like that one, or has the id of another that stays.
        LostReplicaError: Another one is not, and will leave.
    """
    first = max(range(len(cards)), key=lambda n: (cards[n]["commits"], -n))
    ids, here, there = [card["id"] for card in cards], cards[place]["run"], cards[first]["run"]
    twins = [n for n, other in enumerate(ids) if other == ids[place]]
    if len(twins) > 1 and place != (first if first in twins else twins[0]):
        raise ConfigError("fault_tolerance.replica_id", ids[place], "one that no other replica has")
    for key in sorted(here.keys() | there.keys()):
        want = f"{there.get(key)!r}, as replica {ids[first]} has, a member of the quorum"
        require(here.get(key) == there.get(key), key, here.get(key), want)
    if len(set(ids)) < len(ids) or any(card["run"] != here for card in cards):
        raise LostReplicaError("another replica has another run, or the id of a third one")


def gloo_group(
    store: dist.Store, rank: int, ranks: int, timeout: timedelta, address: str
) -> tuple[dist.ProcessGroup, set[tuple[str, int]]]:
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


def _listening() -> set[tuple[str, int]]:
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
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as opened:
                    yield opened
