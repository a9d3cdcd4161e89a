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
from torchtitan.tools.logging import logger

from torchtitan_lr.console.native import NativeLines
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.replicas.exchange import gather_bytes
from torchtitan_lr.replicas.fingerprint import Fingerprint, check_same
from torchtitan_lr.replicas.group import LostReplicaError, ReplicaGroup
from torchtitan_lr.replicas.transport import HealTransport
from torchtitan_lr.training.guard import QuorumError

_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT = timedelta(seconds=30)


class Membership:
    """This replica's membership in the quorum.

    The constructor opens the ports and starts the heartbeat, for which the other replicas then
    wait: build it when the next thing is a step.

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
        self.group = ReplicaGroup(timedelta(milliseconds=section.process_group_timeout_ms))
        self.transport = HealTransport(section.address, fingerprint)
        self._commits = 0
        self._compared = -1
        # The other replicas connect to this store, so it is not the ranks' own.
        self._store = dist.TCPStore(
            section.address, 0, is_master=True, wait_for_workers=False, use_libuv=True
        )
        self._manager = Manager(
            pg=self.group,
            load_state_dict=load,
            state_dict=state,
            min_replica_size=section.min_replica_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=section.heal_timeout_s),
            quorum_timeout=timedelta(seconds=section.quorum_timeout_s),
            connect_timeout=_CONNECT,
            rank=0,
            world_size=1,
            store_addr=section.address,
            store_port=self._store.port,
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
            Whether the step can be tried.

        Raises:
            QuorumError: There was no quorum in time.
            ConfigError: The other replicas have another configuration, or this one's id.
        """
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
        """Vote, and return whether the step is committed.

        Args:
            succeeded: Whether all collectives of this replica have succeeded.
        """
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
