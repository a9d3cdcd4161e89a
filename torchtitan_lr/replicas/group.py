# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The process group of the replicas that take part in a step; needs torchft.

It is a gloo group that is built anew whenever a replica joins or leaves. A collective that fails
marks the whole step as lost: the group is aborted, so that the other replicas do not wait for the
timeout, and every later call fails at once. torchft's own wrapper returns tensors with undefined
contents instead, and averages by default.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torchft import ProcessGroupGloo
from torchtitan.tools.logging import logger


class LostReplicaError(RuntimeError):
    """A collective of this step failed: a replica has left, hangs, or aborted the step."""


class ReplicaGroup(ProcessGroupGloo):
    """A gloo group over the replicas of the present quorum.

    Args:
        timeout: How long a collective waits for a replica that hangs.

    Attributes:
        replicas: Ids of the replicas that take part, in the order of their ranks.
        place: This replica's rank in the group.
        generation: Number of the quorum; another one after every change of the members.
        failure: Why a collective of this generation failed; None until one does.
        bytes_sent: Bytes of the tensors given to all-reduces and broadcasts so far.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self.replicas: list[int] = []
        self.place = 0
        self.generation = -1
        self.failure: Exception | None = None
        self.bytes_sent = 0

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
        super().configure(
            store_addr,
            replica_id,
            rank,
            world_size,
            quorum_id,
            group_rank,
            group_world_size,
            global_ranks,
        )

    def errored(self) -> Exception | None:
        """Return why this step is lost; torchft's manager then votes against a commit."""
        return self.failure

    def lose(self, error: Exception) -> None:
        """Mark the step as lost and close the connections, at which the other members notice."""
        if self.failure is None:
            self.failure = error
            logger.info("Collective of quorum %d failed: %s", self.generation, error)
            self.abort()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Start an all-reduce; only waiting for it raises."""
        return _guarded(self, super().allreduce, tensors, opts)

    def broadcast(self, tensor_list: list[Tensor], opts: Any) -> Any:
        """Start a broadcast; only waiting for it raises."""
        return _guarded(self, super().broadcast, tensor_list, opts)


class GuardedWork:
    """A collective under way.

    Args:
        group: Its group.
        work: torch's handle; None if it could not start.
    """

    def __init__(self, group: ReplicaGroup, work: Any) -> None:
        self._group, self._work = group, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result.

        Raises:
            LostReplicaError: This collective, or one before it, has failed.
        """
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:
            self._group.lose(error)
        if self._group.failure is not None:
            raise LostReplicaError(str(self._group.failure)) from self._group.failure
        return True


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
