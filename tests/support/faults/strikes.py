# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A replica that strikes itself at a chosen point; needs torchft.

The methods of the product's classes are replaced in the process of one replica, after its fork.
They call the replaced ones and add three things: a fault, a pause in place of a longer
computation, and notes of what was sent.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.faults.orders import (
    BEFORE,
    COMMITTED,
    COMPARISON,
    DURING,
    HEAL,
    VOTE,
    Strike,
    note,
    order,
    ordered,
    sent_by,
)
from torchtitan_lr.replicas.group import ReplicaGroup
from torchtitan_lr.replicas.membership import Membership
from torchtitan_lr.replicas.transport import HealTransport

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass
class Arms:
    """What a replica of a check does besides training; call it in the replica's process.

    Attributes:
        folder: Folder of orders and notes.
        replica: Its id.
        interval: Steps between refreshes.
        pause: Seconds added to every step.
        heal_pause: Seconds added to every heal.
        namespace: Network namespace of the replica; empty for that of the check.
        device: Device whose bytes are noted; empty for none.
    """

    folder: Path
    replica: int
    interval: int
    pause: float = 0.0
    heal_pause: float = 0.0
    namespace: str = ""
    device: str = ""

    def __call__(self) -> None:
        """Enter the namespace and replace the methods."""
        if self.namespace:
            enter(self.namespace)
            # The store of the check is not reachable from here; one rank needs no other.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            os.environ["MASTER_PORT"] = "0"
        _Armed(self).replace()


class _Armed:
    """The replaced methods, and where in a step the replica is."""

    def __init__(self, arms: Arms) -> None:
        self._arms = arms
        self._order: Strike | None = None
        self._step, self._joining = 0, False
        self._calls: list[int] = []

    def replace(self) -> None:
        """Replace the methods of the classes."""
        _wrap(Membership, "join", self._join)
        _wrap(Membership, "commit", self._commit)
        _wrap(ReplicaGroup, "allreduce", self._collective)
        _wrap(HealTransport, "recv_checkpoint", self._receive)

    def _join(self, join: Callable[..., Any], members: Any) -> Any:
        self._order = ordered(self._arms.folder, self._arms.replica)
        self._step, self._joining, self._calls = members.committed + 1, True, []
        before = self._sent()
        joined = join(members)
        self._note("join", before, heals=members.committed + 1 - self._step)
        self._step, self._joining, self._calls = members.committed + 1, False, []
        before = self._sent()
        time.sleep(self._arms.pause)
        self._note("pause", before, seconds=self._arms.pause)
        self._before_step = self._sent()
        return joined

    def _commit(self, commit: Callable[..., Any], members: Any, succeeded: bool) -> Any:
        self._note("step", self._before_step, succeeded=succeeded)
        before = self._sent()
        if succeeded:
            self._strike(VOTE)
        committed = commit(members, succeeded)
        self._note("vote", before)
        if committed:
            self._strike(COMMITTED)
        return committed

    def _collective(
        self, allreduce: Callable[..., Any], group: Any, tensors: Any, opts: Any
    ) -> Any:
        self._calls.append(sum(tensor.nbytes for tensor in tensors))
        self._strike(COMPARISON if self._joining else BEFORE)
        work = allreduce(group, tensors, opts)
        if not self._joining:
            self._strike(DURING)
        return work

    def _receive(
        self, receive: Callable[..., Any], transport: Any, *args: Any, **named: Any
    ) -> Any:
        begin = time.time()
        state = receive(transport, *args, **named)
        self._strike(HEAL)
        time.sleep(self._arms.heal_pause)
        self._note("heal", None, seconds=time.time() - begin, size=transport.bytes_received)
        return state

    def _strike(self, point: str) -> None:
        """Send the signal if this is the point of the order."""
        due = self._order
        if due is None or due.point != point:
            return
        if point in (BEFORE, DURING, COMPARISON) and due.index != len(self._calls) - 1:
            return
        if point not in (COMPARISON, HEAL) and not due.is_due(self._step, self._arms.interval):
            return
        self._order = None
        order(self._arms.folder, self._arms.replica, None)
        note(self._arms.folder, self._arms.replica, "struck", step=self._step)
        os.kill(os.getpid(), signal.Signals[due.signal])

    def _sent(self) -> int:
        if not self._arms.device:
            return 0
        return sent_by(self._arms.device, Path("/proc/thread-self/net/dev").read_text())

    def _note(self, name: str, before: int | None, **values: Any) -> None:
        """Note what the replica has sent since ``before``, and its calls."""
        sent = 0 if before is None else self._sent() - before
        note(
            self._arms.folder,
            self._arms.replica,
            name,
            step=self._step,
            sent=sent,
            calls=self._calls,
            **values,
        )


def enter(namespace: str) -> None:
    """Move this process, which has one thread, to a named network namespace.

    Raises:
        OSError: It does not exist, or the kernel refuses.
    """
    with open(f"/var/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by ``wrapper(method, self, ...)``."""
    method = getattr(owner, name)

    def replaced(self: Any, *args: Any, **named: Any) -> Any:
        return wrapper(method, self, *args, **named)

    setattr(owner, name, replaced)
