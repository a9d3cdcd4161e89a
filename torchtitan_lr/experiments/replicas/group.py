# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The process group of the replicas that take part in a step; needs torchft.

It is a gloo group that is built anew whenever a replica joins or leaves. Each rank of a replica has
its own, with the ranks of the same number in the other replicas.

A collective that fails marks the whole step as lost: this replica closes its connections, so that
no other waits for it until the timeout, and its later calls do nothing. No call raises. The step
goes on with undefined sums up to the vote, which discards it: the ranks of one replica thus make
the same calls to one another, whichever of them has lost a sum. torchft's own wrapper averages by
default.

Members that would sum tensors of different sizes lose the step too (`agreement`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import ProcessGroupGloo
from torchft.process_group import create_store_client

from torchtitan_lr.experiments.replicas.agreement import ANY, CallAgreement
from torchtitan_lr.experiments.replicas.gloo import GlooConnections, gloo_group
from torchtitan_lr.titan import logger


class ReplicaGroup(ProcessGroupGloo):
    """A gloo group over the replicas of the present quorum.

    Attributes:
        replicas: Ids of the replicas that take part, in the order of their ranks.
        place: This replica's rank in the group.
        generation: Number of the quorum; another one after every change of the members.
        failure: Why a collective of this generation failed; None until one does.
        bytes_sent: Bytes of the tensors given to all-reduces and broadcasts so far.
        calls: What the members agree on before they sum.
        size_is_agreed: Whether the next sums are those of `of_agreed_size`.
    """

    def __init__(self, timeout: timedelta, address: str) -> None:
        super().__init__(timeout=timeout)
        self.limit, self.address = timeout, address
        self.replicas: list[int] = []
        self.place = 0
        self.generation = -1
        self.failure: Exception | None = None
        self.bytes_sent = 0
        self.calls = CallAgreement()
        self.size_is_agreed = False
        self._connections = GlooConnections(set(), set())

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

        Args:
            store_addr: host:port and prefix of their store.
            replica_id: This replica's name.
            rank: This replica's rank.
            world_size: Number of members.
            quorum_id: Number of the quorum.
            group_rank: This rank in its replica.
            group_world_size: Ranks of a replica.
            global_ranks: Replica id x ``group_world_size`` + ``group_rank`` of all members.
        """
        self.failure = None
        self.place, self.generation = rank, quorum_id or 0
        self.replicas = [number // (group_world_size or 1) for number in global_ranks or [0]]
        self.abort(errored=False)
        store = create_store_client(store_addr, timeout=self.limit)
        # torchft's own would listen on any interface.
        self._pg, self._connections = gloo_group(store, rank, world_size, self.limit, self.address)

    def errored(self) -> Exception | None:
        """Return why this step is lost; torchft's manager then votes against a commit."""
        return self.failure

    def lose(self, error: Exception) -> None:
        """Mark the step as lost and close the connections, at which the other members notice."""
        if self.failure is None:
            self.failure = error
            logger.info("Collective of quorum %d failed: %s", self.generation, error)
            self._connections.shut()
            self.abort()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Start an all-reduce; neither this nor waiting for it raises."""
        try:
            if self.failure is None:
                self.calls.check(_size(self, tensors), partial(_is_same, self))
        except Exception as error:
            self.lose(error)
        return _guarded(self, super().allreduce, tensors, opts)

    def broadcast(self, tensor_list: list[Tensor], opts: Any) -> Any:
        """Start a broadcast; neither this nor waiting for it raises."""
        return _guarded(self, super().broadcast, tensor_list, opts)

    @contextmanager
    def of_agreed_size(self) -> Iterator[None]:
        """Sum tensors whose size the members know from a sum of this step."""
        self.size_is_agreed = True
        try:
            yield
        finally:
            self.size_is_agreed = False


class GuardedWork:
    """A collective under way."""

    def __init__(self, group: ReplicaGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; the group's ``failure`` says whether there is a result."""
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:
            self._group.lose(error)
        return True


def _size(group: ReplicaGroup, tensors: list[Tensor]) -> str:
    if group.size_is_agreed:
        return ANY
    return ", ".join(f"{tensor.numel()} {tensor.dtype}" for tensor in tensors)


def _is_same(group: ReplicaGroup, number: int) -> bool:
    """Return whether all members give the same number; one round trip."""
    ends = torch.tensor([number, -number])
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.bytes_sent += ends.nbytes
    ProcessGroupGloo.allreduce(group, [ends], options).wait()
    return int(ends[0]) == -int(ends[1])


def _guarded(
    group: ReplicaGroup, start: Callable[..., Any], tensors: list[Tensor], opts: Any
) -> GuardedWork:
    if group.failure is not None:
        return GuardedWork(group, None)
    group.bytes_sent += sum(tensor.nbytes for tensor in tensors)
    try:
        return GuardedWork(group, start(tensors, opts))
    except Exception as error:
        group.lose(error)
        return GuardedWork(group, None)
