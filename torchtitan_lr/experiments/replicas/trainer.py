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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.experiments.replicas import state
from torchtitan_lr.optim.step import step_unless
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig
from torchtitan_lr.titan.specs import REGISTERED_SPECS
from torchtitan_lr.training.guard import StepData, Verdict
from torchtitan_lr.training.metrics import HistoryLogger
from torchtitan_lr.training.trainer import Trainer

if TYPE_CHECKING:
    from torchtitan_lr.experiments.replicas.membership import Membership


class Sums:
    """Numbers of a step, summed over all ranks of the members.

    Args:
        numbers: Valid tokens, loss over the nominal tokens, replicas whose first rank has a stop
            signal, and of every replica its own mean loss, 0 if it is not there.
        nominal: The nominal number of tokens.

    Attributes:
        loss: The mean over the tokens of all members, in nats; not finite if one's is not.
        largest: The largest mean loss of a member, likewise.
    """

    def __init__(self, numbers: Iterable[float], nominal: float) -> None:
        self.tokens, loss, self.stopping, *means = numbers
        self.loss = loss * nominal / self.tokens if self.tokens else math.nan
        self.largest = max(means) if math.isfinite(self.loss) else math.nan


class ReplicaTrainer(Trainer):
    """The trainer of a rank of a replica, which may die and join again at any moment."""

    checkpoint_manager = state.ReplicaCheckpoints
    checkpointer: state.ReplicaCheckpoints
    optimizers: TSROptimizers
    dataloader: TokenDataLoader
    _members: "Membership"

    def __init__(self, job_config: JobConfig) -> None:
        section = self._section = job_config.fault_tolerance
        importlib.import_module(job_config.experimental.custom_import)
        table, name = REGISTERED_SPECS, job_config.model.name
        spec = table[name]

        def build(*, dp_world_size: int, dp_rank: int, **rest: Any) -> Any:
            ranks, rank = section.group_size * dp_world_size, section.replica_id * dp_world_size
            return spec.build_dataloader_fn(dp_world_size=ranks, dp_rank=rank + dp_rank, **rest)

        # The loader reads this replica's part of the data: its ranks are then some of the
        # data-parallel ranks of ``group_size`` replicas.
        table[name] = replace(spec, build_dataloader_fn=build)
        try:
            super().__init__(job_config)
        finally:
            table[name] = spec
        self._batch_degree = 1  # the tokens of all ranks are counted
        loader, training = self.dataloader, job_config.training
        self.gradient_accumulation_steps = loader.microbatches
        self._data_ranks = self.parallel_dims.dp_shard  # of this replica; they read other data
        rows = len(loader.own) * self._data_ranks
        # Of all parts and of one, in a step.
        self._rows = loader.stride * loader.microbatches
        self._positions = state.DataPositions(section.group_size, (self._rows, rows), loader)
        self.checkpointer.states["dataloader"] = self._positions
        # The micro-batches of the step that is tried, and the number of its part's step.
        self._pending: tuple[int, StepData] | None = None
        # Whether the members of the next step are there; None before there are any.
        self._joined: bool | None = None
        self._stops, self._discarded = False, 0
        # What one replica reads in a step, and all of them: the nominal number.
        self._tokens = rows * self.gradient_accumulation_steps * training.seq_len
        self._nominal = float(self._tokens * section.group_size)

    def should_continue_training(self) -> bool:
        """Join the quorum before the first step, then as for any trainer."""
        if self._joined is None and self.step < self.job_config.training.steps:
            self._members, self._joined = self._enter(), False
            self._joined = self._join()
            self.step = self._members.committed
        return super().should_continue_training()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Try the next step with those that are there, until it is committed; record it.

        Raises:
            RunFailedError: Too few replicas came together in time.
            NonFiniteError: As for the trainer's.
            BadDataError: This replica cannot read its data.
        """
        self.metrics_processor.resume()
        members, lost, sent_before = self._members, 0, self._members.group.bytes_sent
        while True:
            joined, self._joined = self._joined or self._join(), False
            if members.committed >= self.job_config.training.steps:
                self.step = members.committed  # healed from one that has finished
                return
            self.step = members.committed + 1
            attempt = self._try(data_iterator) if joined else None
            if members.commit(attempt is not None) and attempt is not None:
                break
            self.optimizers.zero_grad()
            lost += 1
            why = members.group.failure or "another rank of this replica has lost a sum"
            logger.warning("Step %d was discarded: %s", self.step, why)
        self._discarded += lost
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        sums, norm = attempt[0], self._apply(*attempt)
        digests = [""] * dist.get_world_size()
        if self._section.digests:
            dist.all_gather_object(digests, self.digest())
        # Every committed step; the metrics have those that are logged.
        record = {
            "replicas": members.group.replicas,
            "taken": self._positions.taken,
            "tokens": round(sums.tokens),
            "loss": sums.loss,
            "norm": norm,
            "discarded": lost,
            "digest": "-".join(digests) if self._section.digests else None,
        }
        if dist.get_rank() == 0:
            path = Path(self.job_config.job.dump_folder) / "commits.jsonl"
            HistoryLogger(path).log(record, self.step)
        if self.metrics_processor.should_log(self.step):
            losses = sums.loss, sums.largest
            extra = {
                "n_tokens_seen": self.ntokens_seen,
                "lr": lr,
                "skipped_steps": self.skipped_steps,
                "replicas": len(members.group.replicas),
                "discarded_steps": self._discarded,
                "comm_bytes/replicas": members.group.bytes_sent - sent_before,
                **self._reader.metrics(),
            }
            self.metrics_processor.log(self.step, *losses, norm, extra_metrics=extra)
        self.metrics_processor.pause()

    def write_record(self) -> None:
        """Write the run's configuration, if this replica writes."""
        if self.checkpointer.writes:
            super().write_record()

    def close(self) -> None:
        """Leave the quorum, then end what runs beside training."""
        if self._joined is not None:
            self._members.leave()
        super().close()

    def _enter(self) -> "Membership":
        """Open the ports and start the heartbeat."""
        from torchtitan_lr.experiments.replicas import membership  # late: it needs torchft

        return membership.Membership(self)

    def _join(self) -> bool:
        """Return whether the members of the next step are there; choose the one that writes."""
        before, group = self._members.group.replicas, self._members.group
        joined = self._members.join()
        if joined:
            self.checkpointer.writes = group.place == 0
            # The members of a step are new ones: the group is made anew with every change.
            synchronizer = self.optimizers.synchronizer
            synchronizer.groups = replace(synchronizer.groups, replicas=group)
            if group.replicas != before:  # the parts of those that have left stay unread
                logger.info("Replicas after step %d: %s", self._members.committed, group.replicas)
        return joined

    def _try(self, data_iterator: Iterator[Batch]) -> tuple[Sums, torch.Tensor] | None:
        """Compute the step and its sums; return None if a member was lost.

        A lost member ends the attempt only after the last call among the ranks of this replica.

        Returns:
            The sums over all ranks of the members, and the norm of the nominal loss's gradient.
        """
        group, ranks = self._members.group, dist.get_world_size()
        step = self._positions.taken[self._section.replica_id]
        try:
            # A lost step's data are kept; their tokens count only once they are committed.
            if self._pending is None or self._pending[0] != step:
                if self.dataloader.rows != step * self._rows:
                    self.dataloader.seek(step * self._rows)
                data = self._reader.take(data_iterator, self.gradient_accumulation_steps)
                if data.problem is not None:
                    self._stop_for_data(data.problem)
                self._pending = step, data
            data = self._pending[1]
            self.optimizers.zero_grad()
            share = float(self._forward_backward(data.microbatches, self._nominal))
            self._stops = self._stop.name is not None
            means = [0.0] * self._section.group_size
            # The tokens of this replica's ranks; without any the loss is 0.
            means[self._section.replica_id] = share * self._nominal / max(data.global_tokens, 1)
            numbers = torch.tensor([data.tokens, share, 0.0, *means], dtype=torch.float64)
            numbers /= self.parallel_dims.non_data_parallel_size  # ranks with the same tokens
            numbers[2] = self._stops and dist.get_rank() == 0
            # It travels with the gradients' last sums, so that it costs no round trip of its own.
            work: Any = dist.all_reduce(numbers, group=group, async_op=True)
            norm = self.optimizers.synchronize()
            work.wait()
            if ranks > 1:
                dist.all_reduce(numbers)
            sums = Sums(numbers.tolist(), self._nominal)
        except Exception:
            # Undefined sums may be such as no decomposition takes. The other ranks of this replica
            # would wait for this one: then the replica ends.
            if group.failure is None or ranks > 1:
                raise
            return None
        return None if group.failure else (sums, norm)

    def _apply(self, sums: Sums, norm: torch.Tensor) -> float:
        """Take a committed step; return the gradient's norm."""
        replicas, ranks = self._members.group.replicas, dist.get_world_size()
        factor = torch.tensor(self._nominal / sums.tokens if sums.tokens else math.nan)
        self.optimizers.scale(factor)
        self.checkpointer.run_ends = len(replicas) - sums.stopping < self._section.min_replica_size
        stops = self._stops or bool(sums.stopping and self.checkpointer.run_ends)
        loss = torch.tensor(sums.loss, dtype=torch.float64)
        verdict = Verdict(loss, (norm * factor).square() / ranks, stops)
        self.optimizers.clip(self.job_config.training.max_norm, verdict.norm)
        self.checkpointer.maybe_wait_for_staging()
        step_unless(verdict.rejected, self.optimizers)
        self._unread = self.step, verdict, sums.tokens
        self.lr_schedulers.step()
        for replica in replicas:
            self._positions.taken[replica] += 1
        read = self._tokens * len(replicas)
        self.ntokens_seen += read
        self.metrics_processor.ntokens_since_last_log += read // self._data_ranks
        self._settle()
        return float(verdict.norm)

    def healing_state(self) -> dict[str, Any]:
        """Return what a newcomer takes over: everything as after the last committed step."""
        return {
            "train": self.state_dict() | {"step": self._members.committed},
            "positions": self._positions.state_dict(),
            "training": state.training_state(self),
        }

    def heal(self, ahead: dict[str, Any]) -> None:
        """Take over the state of a replica that is ahead."""
        self.checkpointer.maybe_wait_for_staging()
        state.load_training_state(self, ahead["training"])
        self._positions.load_state_dict(ahead["positions"])
        self.load_state_dict(ahead["train"])
        logger.info("Healed to step %d", self.step)

    def digest(self) -> str:
        """Return the digest of weights, optimizer state and data positions."""
        return state.digest([state.training_state(self), self._positions.taken])

    def _make_up_for_validation(self) -> None:
        """Do not validate alone after a restart: the other replicas would wait."""
