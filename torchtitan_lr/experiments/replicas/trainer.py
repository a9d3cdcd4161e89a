# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The trainer of one rank of a replica, one among several that come and go.

A step is tried until the quorum commits it. Weights, optimizer state, schedule, tokens and data
position change only after the commit, so a lost step leaves no trace, and its micro-batches are
taken again.

The members of a step are known only to the quorum, and their tokens only after the sums. Backward
therefore divides the loss by a nominal number of tokens. The summed gradients, which are linear in
the loss, are multiplied by nominal over real tokens before clipping: the loss is the mean over the
tokens of those that took part.

The ranks of one replica share its weights (FSDP) and make the same calls to one another in every
attempt, whether sums between replicas succeed or not. The vote is common to all of them.
"""

import importlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.data.rows import Batch
from torchtitan_lr.experiments.replicas.checkpoints import ReplicaCheckpoints, StoredPositions
from torchtitan_lr.experiments.replicas.commits import COMMITS_FILE, Sums, add_commit
from torchtitan_lr.experiments.replicas.exchange import LostReplicaError, joined_ranks
from torchtitan_lr.experiments.replicas.fingerprint import run_fingerprint
from torchtitan_lr.experiments.replicas.first_call import FirstCall, SeenLoss
from torchtitan_lr.experiments.replicas.positions import DataPositions
from torchtitan_lr.experiments.replicas.state import digest, load_training_state, training_state
from torchtitan_lr.optim.finite import step_unless
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig
from torchtitan_lr.titan.specs import registered_specs
from torchtitan_lr.training.guard import StepData, Verdict
from torchtitan_lr.training.trainer import Trainer

if TYPE_CHECKING:
    from torchtitan_lr.experiments.replicas.membership import Membership


@dataclass(frozen=True)
class Attempt:
    """A step whose sums have all arrived, before the vote.

    Attributes:
        sums: The sums over all ranks of the members.
        norm: Norm of the gradient of the nominal loss.
        stops: Whether this rank got a stop signal before its first call.
    """

    sums: Sums
    norm: torch.Tensor
    stops: bool


class ReplicaTrainer(Trainer):
    """The trainer of a rank of a replica, which may die and join again at any moment."""

    checkpoint_manager = ReplicaCheckpoints
    checkpointer: ReplicaCheckpoints
    optimizers: TSROptimizers
    dataloader: TokenDataLoader
    loss_fn: Any

    def __init__(self, job_config: JobConfig) -> None:
        self._section = job_config.fault_tolerance
        with _rows_of_replica(job_config):
            super().__init__(job_config)
        self._batch_degree = 1  # the tokens of all ranks are counted
        self.gradient_accumulation_steps = self.dataloader.microbatches
        loader = self.dataloader
        split = loader.global_batch_size, loader.local_batch_size * self._data_ranks
        self._positions = DataPositions(self._section.group_size, split)
        self.checkpointer.states["dataloader"] = StoredPositions(self._positions, loader)
        # The micro-batches of the step that is tried, and the number of its part's step.
        self._pending: tuple[int, StepData] | None = None
        self._iterator: Iterator[Batch] = iter(())
        self._members: Membership | None = None
        self._joined = False
        self._discarded = 0
        self._commits = Path(job_config.job.dump_folder) / COMMITS_FILE
        training = job_config.training
        rows = training.local_batch_size * self.gradient_accumulation_steps * self._data_ranks
        self._nominal = float(rows * training.seq_len * self._section.group_size)
        self.loss_fn = SeenLoss(self.loss_fn, self._loss_is_known)
        self._first: FirstCall | None = None
        self._stops = False

    def should_continue_training(self) -> bool:
        """Join the quorum before the first step, then as for any trainer."""
        finished = self.step >= self.job_config.training.steps
        if self._members is None and not finished:
            self._members = self._enter()
            self._joined = self._join()
            self.step = self._members.committed
        return super().should_continue_training()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Try the next step with those that are there, until it is committed.

        Raises:
            QuorumError: Too few replicas came together in time.
            NonFiniteError: As for the trainer's.
            BadDataError: This replica cannot read its data.
        """
        assert self._members is not None
        self.metrics_processor.resume()
        self._iterator = data_iterator
        members, begin = self._members, time.perf_counter()
        bytes_before, lost = members.group.bytes_sent, 0
        while True:
            joined = self._joined or self._join()
            self._joined = False
            if members.committed >= self.job_config.training.steps:
                self.step = members.committed  # healed from one that has finished
                return
            self.step = members.committed + 1
            attempt = self._try() if joined else None
            if members.commit(attempt is not None) and attempt is not None:
                break
            members.group.calls.end(committed=False)
            self.optimizers.zero_grad()
            lost += 1
            why = members.group.failure or "another rank of this replica has lost a sum"
            logger.warning("Step %d was discarded: %s", self.step, why)
        members.group.calls.end(committed=True)
        self._discarded += lost
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        norm = self._apply(attempt)
        digest = joined_ranks(self._digest()) if self._section.digests else None
        if self._rank == 0:
            add_commit(
                self._commits,
                self.step,
                members.group.replicas,
                self._positions.taken,
                attempt.sums.tokens,
                loss=attempt.sums.loss(self._nominal),
                norm=norm,
                discarded=lost,
                seconds=time.perf_counter() - begin,
                bytes_sent=members.group.bytes_sent - bytes_before,
                digest=digest,
                ranks=self._data_ranks,
            )
        if self.metrics_processor.should_log(self.step):
            self._log_commit(attempt.sums, norm, lr, members.group.bytes_sent - bytes_before)
        self._maybe_stop()
        self.metrics_processor.pause()

    def write_record(self) -> None:
        """Write the run's configuration, if this replica writes."""
        if self.checkpointer.writes:
            super().write_record()

    def close(self) -> None:
        """Leave the quorum, then end what runs beside training."""
        if self._members is not None:
            self._members.leave()
        super().close()

    def _enter(self) -> "Membership":
        """Open the ports and start the heartbeat."""
        from torchtitan_lr.experiments.replicas.membership import (
            Membership,
        )  # late: it needs torchft

        corpus = self.dataloader.dataset.identity
        return Membership(
            self._section,
            run_fingerprint(self.job_config, self.checkpointer.fingerprint, corpus, self._ranks),
            self.step,
            self._healing_state,
            self._heal,
            self._digest,
        )

    def _join(self) -> bool:
        """Return whether the members of the next step are there; choose the one that writes."""
        assert self._members is not None
        before = set(self._members.group.replicas)
        joined = self._members.join()
        if joined:
            self.checkpointer.writes = self._members.writes
            # The members of a step are new ones: the group is made anew with every change.
            synchronizer = self.optimizers.synchronizer
            synchronizer.groups = replace(synchronizer.groups, replicas=self._members.group)
            self._report_absent(before - set(self._members.group.replicas))
        return joined

    def _report_absent(self, absent: set[int]) -> None:
        """Log what a replica that has left has not read."""
        for replica in sorted(absent):
            logger.warning(
                "Replica %d has left: of part %d of the data, all from its step %d on stays unread "
                "until it is back",
                replica,
                replica,
                self._positions.taken[replica],
            )

    def _try(self) -> Attempt | None:
        """Compute the step and its sums; return None if a member was lost.

        A lost member ends the attempt only after the last call among the ranks of this replica.
        """
        assert self._members is not None
        group = self._members.group
        try:
            data = self._next_data()
            self.optimizers.zero_grad()
            due = self.optimizers.due()
            group.calls.begin(repr((due, len(group.replicas))))
            first = FirstCall(group, len(data.microbatches), partial(self._numbers, data))
            self._first = first
            self._forward_backward(data.microbatches, self._nominal)
            norm = self.optimizers.synchronize()
            sums = Sums(*first.result())
        except LostReplicaError:
            return None
        except Exception:
            # Undefined sums may be such as no decomposition takes. The other ranks of this replica
            # would wait for this one: then the replica ends.
            if group.failure is None or self._ranks > 1:
                raise
            return None
        finally:
            self._first = None
        return None if group.failure else Attempt(sums, norm, self._stops)

    def _loss_is_known(self, loss: torch.Tensor) -> None:
        if self._first is not None:
            self._first.add(loss)

    def _numbers(self, data: StepData, loss: float) -> list[float]:
        """Return what this rank adds to the first call, given its summed token losses."""
        self._stops = self._stop.name is not None
        mesh = self.parallel_dims.get_optional_mesh("tp")
        is_copy = mesh is not None and mesh.get_local_rank() > 0
        stops = self._stops and self._rank == 0
        share = loss / self._nominal
        return list(Sums.of(data, share, stops, self._nominal, self._section, is_copy))

    def _apply(self, attempt: Attempt) -> float:
        """Take a committed step; return the gradient's norm."""
        assert self._members is not None
        sums, group = attempt.sums, self._members.group
        factor = torch.tensor(self._nominal / sums.tokens if sums.tokens else math.nan)
        self.optimizers.scale(factor)
        remaining = len(group.replicas) - sums.stopping
        self.checkpointer.run_ends = remaining < self._section.min_replica_size
        stops = attempt.stops or bool(sums.stopping and self.checkpointer.run_ends)
        loss = torch.tensor(sums.loss(self._nominal), dtype=torch.float64)
        verdict = Verdict(loss, (attempt.norm * factor).square() / self._ranks, stops)
        limit, rejected = self.job_config.training.max_norm, verdict.rejected
        self._gradients.clip(limit, verdict.norm)
        self.checkpointer.maybe_wait_for_staging()
        step_unless(rejected, self.optimizers)
        self._unread = self.step, verdict, sums.tokens
        self.lr_schedulers.step()
        self._positions.commit(group.replicas)
        self.ntokens_seen += int(sums.read)
        self.metrics_processor.ntokens_since_last_log += int(sums.read) // self._data_ranks
        self._settle()
        return float(verdict.norm)

    def _next_data(self) -> StepData:
        """Read the first step of this part that is not committed; a lost one's data are kept.

        Their tokens count only once they are committed.
        """
        part = self._section.replica_id
        step, row = self._positions.taken[part], self._positions.row_of(part)
        if self._pending is not None and self._pending[0] == step:
            return self._pending[1]
        if self.dataloader.rows != row:
            self.dataloader.seek(row)
        metrics = self.metrics_processor
        seen, since = self.ntokens_seen, metrics.ntokens_since_last_log
        data = self._reader.read(self._iterator, self.gradient_accumulation_steps)
        self.ntokens_seen, metrics.ntokens_since_last_log = seen, since
        if data.problem is not None:
            self._stop_for_data(data.problem)
        self._pending = step, data
        return data

    @property
    def _data_ranks(self) -> int:
        """Ranks of this replica that read different data."""
        return self.parallel_dims.dp_shard

    @property
    def _ranks(self) -> int:
        return torch.distributed.get_world_size()

    @property
    def _rank(self) -> int:
        return torch.distributed.get_rank()

    def _healing_state(self) -> dict[str, Any]:
        """Return what a newcomer takes over: everything as after the last committed step."""
        assert self._members is not None
        return {
            "train": self.state_dict() | {"step": self._members.committed},
            "positions": self._positions.as_json(),
            "training": self._training_state(),
            "calls": self._members.group.calls.known,
        }

    def _heal(self, state: dict[str, Any]) -> None:
        """Take over the state of a replica that is ahead."""
        self.checkpointer.maybe_wait_for_staging()
        load_training_state(
            state["training"], self.model_parts, self.optimizers, self.lr_schedulers
        )
        self._positions.load_json(state["positions"])
        self.load_state_dict(state["train"])
        assert self._members is not None
        self._members.group.calls.known = dict(state["calls"])
        size = self._members.transport.bytes_received
        logger.info("Healed to step %d; %d bytes received so far", self.step, size)

    def _training_state(self) -> Any:
        return training_state(self.model_parts, self.optimizers, self.lr_schedulers)

    def _digest(self) -> str:
        return digest([self._training_state(), self._positions.taken])

    def _log_commit(self, sums: Sums, norm: float, lr: float, bytes_sent: int) -> None:
        assert self._members is not None
        self.metrics_processor.log(
            self.step,
            sums.loss(self._nominal),
            sums.largest(self._members.group.replicas),
            norm,
            extra_metrics={
                "n_tokens_seen": self.ntokens_seen,
                "lr": lr,
                "skipped_steps": self.skipped_steps,
                "replicas": len(self._members.group.replicas),
                "discarded_steps": self._discarded,
                "comm_bytes/replicas": bytes_sent,
                **self._reader.metrics(),
            },
        )

    def _make_up_for_validation(self) -> None:
        """Do not validate alone after a restart: the other replicas would wait."""


@contextmanager
def _rows_of_replica(config: JobConfig) -> Iterator[None]:
    """Let the loader that is built meanwhile read this replica's part of the data.

    Its ranks are then some of the data-parallel ranks of ``group_size`` replicas.
    """
    importlib.import_module(config.experimental.custom_import)
    section, table, name = config.fault_tolerance, registered_specs(), config.model.name
    spec = table[name]

    def build(*, dp_world_size: int, dp_rank: int, **rest: Any) -> Any:
        ranks, rank = section.group_size * dp_world_size, section.replica_id * dp_world_size
        return spec.build_dataloader_fn(dp_world_size=ranks, dp_rank=rank + dp_rank, **rest)

    table[name] = replace(spec, build_dataloader_fn=build)
    try:
        yield
    finally:
        table[name] = spec
