# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Quorum, healing and commit of every step, on torchft's manager; needs torchft.

The quorum is synchronous: a step begins once its members are known and newcomers have healed. An
asynchronous quorum, torchft's default, would let a stale step send collectives that do not match.
"""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft import Manager

from torchtitan_lr.console.native import NativeLines
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.experiments.replicas.exchange import (
    LostReplicaError,
    from_first_rank,
    gather_bytes,
    least_of_ranks,
)
from torchtitan_lr.experiments.replicas.fingerprint import Fingerprint, check_same
from torchtitan_lr.experiments.replicas.group import ReplicaGroup
from torchtitan_lr.experiments.replicas.transport import HealTransport
from torchtitan_lr.titan import logger

_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT = timedelta(seconds=30)


class QuorumError(RunFailedError):
    """Too few replicas came together in time (``[fault_tolerance]``)."""


class Membership:
    """This rank's part of its replica's membership in the quorum.

    The first rank of a replica runs torchft's manager server and the store by which replicas meet.
    Every rank is a client of that server: it takes part in the quorum and in the vote, and heals
    from the rank of its number. The constructor opens the ports and starts the heartbeat, for which
    the other replicas then wait: build it on all ranks, when the next thing is a step.

    Args:
        section: ``[fault_tolerance]``.
        fingerprint: Of this replica's run.
        step: The last committed step that this replica has.
        state: Returns the state that a newcomer takes over.
        load: Loads such a state.
        state_digest: Returns the digest of the weights and the optimizer state.

    Attributes:
        group: The process group of the members.
        transport: What serves and fetches states.
    """

    def __init__(
        self,
        section: Any,
        fingerprint: Fingerprint,
        step: int,
        state: Callable[[], Any],
        load: Callable[[Any], None],
        state_digest: Callable[[], str],
    ) -> None:
        self._section, self._fingerprint, self._digest = section, fingerprint, state_digest
        # It warns at every start that NCCL has no flight recorder here.
        logging.getLogger("torchft.manager").setLevel(logging.ERROR)
        self._relay = NativeLines(b" [INFO] [torchft::")
        timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        self.group = ReplicaGroup(timeout, section.address)
        self.transport = HealTransport(section.address, fingerprint)
        self._commits = 0
        self._compared = -1
        # The other replicas connect to this store, so it is not the ranks' own.
        rank = dist.get_rank()
        self._store = None
        if rank == 0:
            self._store = dist.TCPStore(
                section.address, 0, is_master=True, wait_for_workers=False, use_libuv=True
            )
        port = from_first_rank(self._store.port if self._store is not None else None)
        self._manager = Manager(
            pg=self.group,
            load_state_dict=load,
            state_dict=state,
            min_replica_size=section.min_replica_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=section.heal_timeout_s),
            quorum_timeout=timedelta(seconds=section.quorum_timeout_s),
            connect_timeout=_CONNECT,
            rank=rank,
            world_size=dist.get_world_size(),
            store_addr=section.address,
            store_port=port,
            lighthouse_addr=f"http://{section.lighthouse}",
            replica_id=f"replica_{section.replica_id}",
            port=0,
            hostname=section.address,
            heartbeat_interval=_HEARTBEAT,
            checkpoint_transport=self.transport,
            quorum_retries=section.quorum_retries,
        )
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    @property
    def committed(self) -> int:
        """Number of committed steps."""
        return int(self._manager.current_step())

    @property
    def writes(self) -> bool:
        """Whether this replica writes checkpoints and metrics: it is the first member."""
        return self.group.place == 0

    def join(self) -> bool:
        """Wait for the members of the next step, and heal if this replica is behind.

        Returns:
            Whether the step can be tried, the same on all ranks of this replica.

        Raises:
            QuorumError: There was no quorum in time.
            ConfigError: The other replicas have another configuration, or this one's id.
        """
        joined = self._join_alone()
        all_joined, step = least_of_ranks(joined, self.committed)
        if step != self.committed:  # another rank could not heal: all heal again
            self._manager.load_state_dict({"step": step, "batches_committed": 0})
        if not all_joined:
            self.group.lose(LostReplicaError("another rank of this replica has not joined"))
        return bool(all_joined)

    def _join_alone(self) -> bool:
        """As `join`, for this rank."""
        before = list(self.group.replicas)
        try:
            self._manager.start_quorum()
        except Exception as error:
            why = " ".join(str(error).split())
            raise QuorumError(
                f"no quorum of {self._section.min_replica_size} replicas within "
                f"{self._section.quorum_timeout_s} s, lighthouse {self._section.lighthouse}: {why}"
            ) from error
        if self.transport.refusal is not None:
            raise self.transport.refusal
        problem = self._manager.errored()
        if problem is not None:
            self.group.lose(problem)  # the other members would wait for the timeout
            return False
        if before and before != self.group.replicas:
            logger.info("Replicas after step %d: %s", self.committed, self.group.replicas)
        try:
            if self._compared != self.group.generation:
                self._compare()
        except LostReplicaError:
            return False
        return True

    def commit(self, succeeded: bool) -> bool:
        """Vote, and return whether the step is committed."""
        if not succeeded:
            self._manager.report_error(self.group.failure or LostReplicaError("step abandoned"))
        committed = bool(self._manager.should_commit())
        self._commits += committed
        return committed

    def leave(self) -> None:
        """Close the ports and end the heartbeat; the others go on without this replica."""
        self._manager.shutdown(wait=False)
        self.group.shutdown()
        self._relay.close()

    def _compare(self) -> None:
        """Compare all members with the one that has committed most steps since it started.

        Raises:
            ConfigError: This replica is not like that one.
            LostReplicaError: Another one is not; it leaves, and the step is tried again.
        """
        own = {
            "id": self._section.replica_id,
            "commits": self._commits,
            "fingerprint": self._fingerprint,
            "digest": self._digest(),
        }
        members = [json.loads(row) for row in gather_bytes(self.group, json.dumps(own).encode())]
        first = max(range(len(members)), key=lambda place: (members[place]["commits"], -place))
        who = f"the members of the quorum (replica {members[first]['id']})"
        self._check_id([member["id"] for member in members], first)
        check_same(self._fingerprint, members[first]["fingerprint"], who)
        if own["digest"] != members[first]["digest"]:
            want = f"the checkpoint of step {self.committed} that {who} have, or an empty folder"
            raise ConfigError("job.dump_folder", "other weights or optimizer state", want)
        for member in members:
            same = ("fingerprint", "digest")
            if any(member[key] != own[key] for key in same):
                self.group.lose(LostReplicaError(f"replica {member['id']} has another run"))
                raise LostReplicaError(str(self.group.failure))
        self._compared = self.group.generation

    def _check_id(self, ids: list[int], first: int) -> None:
        """Raise if another replica has this one's id; of two, the other than ``first`` leaves."""
        own = self._section.replica_id
        twins = [place for place, other in enumerate(ids) if other == own]
        stays = first if first in twins else twins[0]
        if len(twins) > 1 and stays != self.group.place:
            raise ConfigError("fault_tolerance.replica_id", own, "one that no other replica has")
        if len(set(ids)) < len(ids):
            self.group.lose(LostReplicaError("two replicas have one id"))
            raise LostReplicaError(str(self.group.failure))
