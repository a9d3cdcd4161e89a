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
from torchft.checkpointing import CheckpointTransport

from torchtitan_lr.agreement import from_first_rank
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.experiments.replicas.group import LostReplicaError, ReplicaGroup, check_members

if TYPE_CHECKING:
    from torchtitan_lr.experiments.replicas.trainer import ReplicaTrainer

_RETRIES = 600  # of a request to the quorum server, which may be restarted meanwhile
_PIECE = 1 << 24  # bytes of a state per message: each has the timeout of a collective

_SAME = (
    *("optimizer", "lr_scheduler", "low_rank", "training", "activation_checkpoint"),
    *("fault_tolerance.group_size", "fault_tolerance.min_replica_size"),
    *("fault_tolerance.process_group_timeout_ms", "checkpoint.enable", "checkpoint.interval"),
    *("checkpoint.last_save_model_only", "debug.seed", "parallelism.tensor_parallel_degree"),
    "parallelism.tp_plan",
)
_MAY_DIFFER = (
    "training.dataset_path",  # the corpus itself is compared
    *("training.gc_freq", "training.gc_debug", "training.allow_changed_corpus"),
    *("training.dataloader", "training.enable_cpu_offload"),
)


def run_fingerprint(
    config: Any, model: dict[str, Any], corpus: str, ranks: int = 1
) -> dict[str, Any]:
    """Return the settings that determine the sums, the schedule and the batches of a run, by key.

    ``model`` and ``corpus`` are the fingerprints of model with tokenizer and of the data; ``ranks``
    are those of a replica.
    """
    found: dict[str, Any] = {}
    for section, table in asdict(config).items():
        keys = {f"{section}.{key}": value for key, value in table.items()}
        found |= {key: keys[key] for key in keys if section in _SAME or key in _SAME}
    found = {key: value for key, value in found.items() if key not in _MAY_DIFFER}
    return found | model | {"training.dataset": corpus, "NGPU": ranks}


class HealTransport(CheckpointTransport[Any]):
    """Sends weights and optimizer state to a newcomer over the group.

    torchft's transports unpickle what they receive. This one loads tensors and plain values only
    (``weights_only``).

    Args:
        group: The members, already connected and compared when torchft calls this.
    """

    def __init__(self, group: ReplicaGroup) -> None:
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
        """Receive a state on the CPU; the sender copies it before its first message."""
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], src_rank, 0).wait(timeout)
        state = torch.empty(int(size), dtype=torch.uint8)
        for piece in state.split(_PIECE):
            self._group.recv([piece], src_rank, 0).wait()
        received = io.BytesIO(state.numpy().tobytes())
        return torch.load(received, map_location="cpu", weights_only=True)


class Membership:
    """This rank's part of its replica's membership in the quorum.

    The first rank of a replica runs torchft's manager server and the store by which replicas meet.
    Every rank is a client of that server: it takes part in the quorum and in the vote, and heals
    from the rank of its number. The constructor opens the ports and starts the heartbeat, for which
    the other replicas then wait: build it on all ranks, when the next thing is a step.

    Attributes:
        group: The process group of the members.
    """

    def __init__(self, trainer: "ReplicaTrainer") -> None:
        config, model = trainer.job_config, trainer.checkpointer.fingerprint
        section, rank, ranks = config.fault_tolerance, dist.get_rank(), dist.get_world_size()
        run = run_fingerprint(config, model, trainer.dataloader.dataset.identity, ranks)
        self._section, self._digest = section, trainer.digest
        # It warns at every start that NCCL has no flight recorder here, and prints the traceback of
        # each error, which `join` reports.
        logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
        timeout = timedelta(milliseconds=section.process_group_timeout_ms)
        self._commits = 0
        self._compared: list[dict[str, Any]] = []  # the cards of the last members with one state
        self.group = ReplicaGroup(
            timeout,
            section.address,
            lambda: {"id": section.replica_id, "commits": self._commits, "run": run},
        )
        if rank == 0:  # The other replicas connect to this store, so it is not the ranks' own.
            self._store = dist.TCPStore(section.address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=self.group,
            load_state_dict=trainer.heal,
            state_dict=trainer.healing_state,
            min_replica_size=section.min_replica_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=section.heal_timeout_s),
            quorum_timeout=timedelta(seconds=section.quorum_timeout_s),
            rank=rank,
            world_size=ranks,
            store_addr=section.address,
            store_port=from_first_rank(self._store.port if rank == 0 else None),
            lighthouse_addr=f"http://{section.lighthouse}",
            replica_id=f"replica_{section.replica_id}",
            hostname=section.address,
            checkpoint_transport=HealTransport(self.group),
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
            RunFailedError: There was no quorum in time.
            ConfigError: The other replicas have another configuration, or this one's id.
        """
        try:
            self._manager.start_quorum()
        except Exception as error:
            why = " ".join(str(error).split())
            raise RunFailedError(
                f"no quorum of {self._section.min_replica_size} replicas within "
                f"{self._section.quorum_timeout_s} s, lighthouse {self._section.lighthouse}: {why}"
            ) from error
        problem = self._manager.errored()
        refusal = getattr(problem, "original_exception", None)
        if isinstance(refusal, ConfigError):
            raise refusal
        if problem is None and self._compared is not self.group.cards:
            problem = self._compare()
        if problem is not None:
            self.group.report_error(problem)  # the other members would wait for the timeout
        least = torch.tensor([problem is None, self.committed], dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        joined, step = least.tolist()
        if step != self.committed:  # another rank could not heal: all heal again
            self._manager.load_state_dict({"step": step, "batches_committed": 0})
        if not joined:
            self.group.report_error(LostReplicaError("another rank of this replica has not joined"))
        return bool(joined)

    def _compare(self) -> Exception | None:
        """Compare weights, optimizer state and data positions; return why this step is lost, if so.

        Raises:
            ConfigError: This replica's are others.
        """
        cards = self.group.cards
        try:
            found = self.group.exchange("digest", f"step {self.committed}, {self._digest()}")
            states = [{"job.dump_folder": state} for state in found]
            same = [card | {"run": state} for card, state in zip(cards, states, strict=True)]
            check_members(same, self.group.place)
        except LostReplicaError as error:
            return error
        self._compared = cards
        return None

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
