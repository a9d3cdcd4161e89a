# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Quorum, healing and commit of every step, on torchft's manager; needs torchft.

The quorum is synchronous: a step begins once its members are known and newcomers have healed. An
asynchronous quorum, torchft's default, would let a stale step send collectives that do not match.
"""

import io
import logging
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchft import Manager

from torchtitan_lr.checkpoints.manifest import from_first_rank
from torchtitan_lr.console.native import NativeLines
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.experiments.replicas.group import LostReplicaError, ReplicaGroup
from torchtitan_lr.titan import logger

if TYPE_CHECKING:
    from torchtitan_lr.experiments.replicas.trainer import ReplicaTrainer

_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT = timedelta(seconds=30)
_RETRIES = 600  # of a request to the quorum server, which may be restarted meanwhile
_PIECE = 1 << 24  # bytes of a state per message: each has the timeout of a collective

_SECTIONS = ("optimizer", "lr_scheduler", "low_rank", "training", "activation_checkpoint")
_MAY_DIFFER = {
    "training.dataset_path",  # the corpus itself is compared
    "training.gc_freq",
    "training.gc_debug",
    "training.allow_changed_corpus",
    "training.dataloader",
    "training.enable_cpu_offload",
}
_SHARED = {
    "fault_tolerance": ("group_size", "min_replica_size", "process_group_timeout_ms"),
    "checkpoint": ("enable", "interval", "last_save_model_only"),
    "debug": ("seed",),
    "parallelism": ("tensor_parallel_degree", "tp_plan"),
}


class QuorumError(RunFailedError):
    """Too few replicas came together in time (``[fault_tolerance]``)."""


def run_fingerprint(
    config: Any, model: dict[str, Any], corpus: str, ranks: int = 1
) -> dict[str, Any]:
    """Return the settings that determine the sums, the schedule and the batches of a run, by key.

    Replicas compare them before any number is exchanged: another rank, schedule or batch gives
    collectives of other sizes, which gloo answers by ending the process. ``model`` and ``corpus``
    are the fingerprints of model with tokenizer and of the data; ``ranks`` are those of a replica.
    """
    found = {
        f"{section}.{key}": value
        for section in _SECTIONS
        for key, value in asdict(getattr(config, section)).items()
    }
    found = {key: value for key, value in found.items() if key not in _MAY_DIFFER}
    for section, keys in _SHARED.items():
        found |= {f"{section}.{key}": getattr(getattr(config, section), key) for key in keys}
    return found | model | {"training.dataset": corpus, "NGPU": ranks}


def check_same(here: dict[str, Any], there: dict[str, Any], who: str) -> None:
    """Raise if two replicas belong to different runs.

    Raises:
        ConfigError: The first key that differs.
    """
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            raise ConfigError(key, here.get(key), f"{there.get(key)!r}, as {who} have")


class HealTransport:
    """Sends weights and optimizer state to a newcomer over the group (torchft's interface).

    torchft's transports unpickle what they receive. This one loads tensors and plain values only
    (``weights_only``), after the newcomer has compared its run with the sender's.

    Args:
        group: The members, already connected when torchft calls this.

    Attributes:
        refusal: Why the state of the others must not be loaded: another configuration. torchft
            swallows exceptions of a transport, so `Membership` raises this one.
        bytes_received: Bytes of fetched states so far.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self.refusal: ConfigError | None = None
        self.bytes_received = 0
        self._group = group

    def metadata(self) -> str:
        """Return nothing: the newcomer knows the group."""
        return ""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Send a state to members; arguments as torchft gives them."""
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        state = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        for place in dst_ranks:
            for message in (torch.tensor([state.numel()]), *state.split(_PIECE)):
                self._group.send([message], place, 0).wait()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receive a state on the CPU; the sender copies it before its first message.

        Raises:
            ConfigError: That run has another configuration; also kept in ``refusal``.
        """
        here, there = (self._group.cards[n]["run"] for n in (self._group.place, src_rank))
        try:
            check_same(here, there, "the other replicas")
        except ConfigError as error:
            self.refusal = error
            raise
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], src_rank, 0).wait(timeout)
        state = torch.empty(int(size), dtype=torch.uint8)
        for piece in state.split(_PIECE):
            self._group.recv([piece], src_rank, 0).wait()
        self.bytes_received += state.numel()
        received = io.BytesIO(state.numpy().tobytes())
        return torch.load(received, map_location="cpu", weights_only=True)

    def disallow_checkpoint(self) -> None:
        """Do nothing: the state has been sent."""

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: the group is closed elsewhere."""


class Membership:
    """This rank's part of its replica's membership in the quorum.

    The first rank of a replica runs torchft's manager server and the store by which replicas meet.
    Every rank is a client of that server: it takes part in the quorum and in the vote, and heals
    from the rank of its number. The constructor opens the ports and starts the heartbeat, for which
    the other replicas then wait: build it on all ranks, when the next thing is a step.

    Attributes:
        group: The process group of the members.
        transport: What sends and receives states.
    """

    def __init__(self, trainer: "ReplicaTrainer") -> None:
        config, model = trainer.job_config, trainer.checkpointer.fingerprint
        section, rank, ranks = config.fault_tolerance, dist.get_rank(), dist.get_world_size()
        run = run_fingerprint(config, model, trainer.dataloader.dataset.identity, ranks)
        self._section, self._digest = section, trainer.digest
        # It warns at every start that NCCL has no flight recorder here.
        logging.getLogger("torchft.manager").setLevel(logging.ERROR)
        self._relay = NativeLines(b" [INFO] [torchft::")
        timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        self._commits, self._compared = 0, -1
        self.group = ReplicaGroup(
            timeout,
            section.address,
            lambda: {"id": section.replica_id, "commits": self._commits, "run": run},
        )
        self.transport = HealTransport(self.group)
        # The other replicas connect to this store, so it is not the ranks' own.
        port = None
        if rank == 0:
            self._store = dist.TCPStore(
                section.address, 0, is_master=True, wait_for_workers=False, use_libuv=True
            )
            port = self._store.port
        self._manager = Manager(
            pg=self.group,
            load_state_dict=trainer.heal,
            state_dict=trainer.healing_state,
            min_replica_size=section.min_replica_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=section.heal_timeout_s),
            quorum_timeout=timedelta(seconds=section.quorum_timeout_s),
            connect_timeout=_CONNECT,
            rank=rank,
            world_size=ranks,
            store_addr=section.address,
            store_port=from_first_rank(port),
            lighthouse_addr=f"http://{section.lighthouse}",
            replica_id=f"replica_{section.replica_id}",
            port=0,
            hostname=section.address,
            heartbeat_interval=_HEARTBEAT,
            checkpoint_transport=self.transport,
            quorum_retries=_RETRIES,
        )
        self._manager.load_state_dict({"step": trainer.step, "batches_committed": 0})

    @property
    def committed(self) -> int:
        """Number of committed steps."""
        return int(self._manager.current_step())

    def join(self) -> bool:
        """Wait for the members of the next step, and heal if this replica is behind.

        Returns:
            Whether the step can be tried, the same on all ranks of this replica.

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
        if problem is None and before and before != self.group.replicas:
            logger.info("Replicas after step %d: %s", self.committed, self.group.replicas)
        try:
            if problem is None and self._compared != self.group.generation:
                self._compare()
        except LostReplicaError as error:
            problem = error
        if problem is not None:
            self.group.lose(problem)  # the other members would wait for the timeout
        least = torch.tensor([problem is None, self.committed], dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        joined, step = least.tolist()
        if step != self.committed:  # another rank could not heal: all heal again
            self._manager.load_state_dict({"step": step, "batches_committed": 0})
        if not joined:
            self.group.lose(LostReplicaError("another rank of this replica has not joined"))
        return bool(joined)

    def _compare(self) -> None:
        """Compare all members with the one that has committed most steps since it started.

        Raises:
            ConfigError: This replica is not like that one, or has the id of another that stays.
            LostReplicaError: Another one is not; it leaves, and the step is tried again.
        """
        cards, place = self.group.cards, self.group.place
        first = max(range(len(cards)), key=lambda n: (cards[n]["commits"], -n))
        ids, own = [card["id"] for card in cards], cards[place]["id"]
        twins = [n for n, other in enumerate(ids) if other == own]
        if len(twins) > 1 and place != (first if first in twins else twins[0]):
            raise ConfigError("fault_tolerance.replica_id", own, "one that no other replica has")
        if len(set(ids)) < len(ids):
            raise LostReplicaError("two replicas have one id")
        who = f"the members of the quorum (replica {ids[first]})"
        check_same(cards[place]["run"], cards[first]["run"], who)
        digests = self.group.exchange("digest", self._digest())
        if digests[place] != digests[first]:
            want = f"the checkpoint of step {self.committed} that {who} have, or an empty folder"
            raise ConfigError("job.dump_folder", "other weights or optimizer state", want)
        for card, digest in zip(cards, digests, strict=True):
            if (card["run"], digest) != (cards[place]["run"], digests[place]):
                raise LostReplicaError(f"replica {card['id']} has another run")
        self._compared = self.group.generation

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
