# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A training run from top to bottom: build, load, step, save, validate, end."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lr.agreement import from_all_ranks, from_first_rank
from torchtitan_lr.checkpoints import run_record
from torchtitan_lr.checkpoints.folders import RESIDUALS, RUN_CONFIG
from torchtitan_lr.compat.process_groups import set_timeouts
from torchtitan_lr.compression.units import Residuals, compressors_of
from torchtitan_lr.console.log import console
from torchtitan_lr.data.corpus import Batch, moved
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.ledger.ledger import OUTER, CommLedger
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.llama import loss_arguments
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.optim.groups import logged_rates, rates_of
from torchtitan_lr.optim.outer import OuterSteps
from torchtitan_lr.parallel.capture import why_eager
from torchtitan_lr.parallel.data_parallel import synchronize_gradients
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, dist_utils
from torchtitan_lr.titan.components import Trainer as TitanTrainer
from torchtitan_lr.titan.components import profilers, trainer_parts
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training import history
from torchtitan_lr.training.checkpoint import CheckpointManager
from torchtitan_lr.training.fingerprint import identity_of, tokenizer_digest
from torchtitan_lr.training.metrics import LowRankMetricsProcessor, described_layout
from torchtitan_lr.training.outer_states import OuterStates
from torchtitan_lr.training.reader import BadDataError, StepData, StepReader, check_same_data
from torchtitan_lr.training.step_graph import CudaCapture, StepGraph, shapes_of
from torchtitan_lr.training.validate import Validator
from torchtitan_lr.training.verdict import (
    Findings,
    NonFiniteError,
    Origin,
    Verdict,
    decide,
    step_unless,
)
from torchtitan_lr.training.watch import Watch

MACHINES_CHANGED = "a change of machines"
"""Name of SIGUSR2, with which the launcher ends the ranks to start them again."""


class Trainer(TitanTrainer):
    """torchtitan's Trainer with our own step, start and end."""

    checkpointer: CheckpointManager
    dataloader: TokenDataLoader
    metrics_processor: LowRankMetricsProcessor
    pp_schedule: Pipeline
    validator: Validator
    ntokens_seen: int
    loss: Tensor  # this rank's share of the last step's loss, an fp64 scalar on the device

    def __init__(self, job_config: JobConfig) -> None:
        bind_device()
        self.before_start: Callable[[], None] = lambda: None  # called with the checkpoint loaded
        self.skipped_steps = 0  # for a non-finite loss or gradient; checkpointed
        self.stop = StopSignal()
        self.stopped_by: str | None = None  # the name of a signal
        self._losses: list[Tensor] = []  # of the steps since the last logged one
        self._first_step = 0
        self._ledger: CommLedger | None = None
        # Prevent upstream from writing the record now: the checkpoint check may still raise, and
        # must leave the record of the existing checkpoints unchanged.
        record_file, job_config.job.save_config_file = job_config.job.save_config_file, None
        # torchtitan builds, by the TrainSpec of `training.register`: loader, model without memory,
        # parallel plan, weights, optimizers, schedules, checkpoints and validation. There is no
        # autocast: FSDP or replication implements mixed precision at every world size.
        with trainer_parts(CheckpointManager):
            super().__init__(job_config)
        job_config.job.save_config_file = record_file or RUN_CONFIG
        self._set_timeouts(job_config.comm.init_timeout_seconds)
        check_same_data(self.dataloader.dataset.identity)
        half = job_config.training.mixed_precision_param != "float32"
        products = ENTRIES[job_config.optimizer.name].half_products
        if self.device.type == "cuda" and half and products:
            # The optimizer's are the only fp32 products of such a run (docs/step.md).
            torch.set_float32_matmul_precision("high")
        dims, path = self.parallel_dims, job_config.model.hf_assets_path
        self._batch_degree = dims.dp_replicate * dims.dp_shard
        digest = from_first_rank(tokenizer_digest(path) if dist.get_rank() == 0 else "")
        self.checkpointer.identity = {
            **identity_of(job_config, dims.world_size, self.model_parts[0].model_args, digest),
            "dataloader": self.dataloader.dataset.identity,
        }
        self.outer: OuterSteps | None = None
        # Replicas that train apart have as many norms as gradients.
        self._apart, self._replica = 1, 0
        if job_config.outer.every:
            parts, replicas = self.model_parts, dims.get_optional_mesh("dp_replicate")
            layers = parts[0].model_args.n_layers
            self.outer = OuterSteps(trained_parameters(*parts), layers, job_config.outer, replicas)
            self._apart, self._replica = self.outer.replicas, self.outer.replica
            OuterStates(self.outer, self.optimizers).replace_in(self.checkpointer.states)
            self.metrics_processor.outer = self.outer
        self._residuals = Residuals(compressors_of(self.model_parts))
        if self._residuals.compressors:
            self.checkpointer.states[RESIDUALS] = self._residuals
        self.build_step()

    def build_step(self) -> None:
        """Build what a step needs beside torchtitan's parts."""
        config, dims = self.job_config, self.parallel_dims
        # An optimizer that sums over the replicas itself has gradients of its own.
        own = getattr(self.optimizers, "gradients", None)
        stages = dims.get_optional_mesh("pp")
        self.gradients = own or StoredGradients(self.model_parts, stages, self._apart)
        seconds = self.metrics_processor.data_loading_times
        self.reader = StepReader(self.dataloader, dims, self.device, seconds)
        pipeline = self.pp_schedule if dims.pp_enabled else None
        self.origin = Origin(self.model_parts, pipeline, dims)
        eager = why_eager(config, dims.world_size, self.device.type)
        if self.device.type == "cuda" and config.training.step_graph != "off":
            how = f"eager: {eager}" if eager else "captured after the first steps"
            if not eager and dims.world_size > 1 and not config.metrics.comm_ledger:
                how += "; metrics.comm_ledger runs logged steps eagerly, and then times the ranks"
            if not eager and ENTRIES[config.optimizer.name].sums_replicas:
                how += "; TSR-Adam's steps that find new bases are eager: they keep whole gradients"
            logger.info("Passes of a step: %s", how)
        self.watch = Watch(self.model_parts, self.device.type == "cuda", dims.cp * dims.tp)
        self.metrics_processor.watch = self.watch
        self.graph = None if eager else StepGraph(self.model_parts, CudaCapture)
        section = config.optimizer
        shapes = {n: tuple(p.shape) for n, p in trained_parameters(*self.model_parts).items()}
        if section.groups:  # some may have parameters on other pipeline stages alone
            shapes = model_shapes(self.model_parts[0].model_args)
        self.rates = logged_rates(section, rates_of(section, shapes))

    @record
    def train(self) -> None:
        """Train to ``training.steps`` or to a stop signal, then save and report."""
        config = self.job_config
        self.stop.install()
        self.dataloader.stopping = lambda: self.stop.name is not None
        self.checkpointer.load(step=config.checkpoint.load_step)
        if self.outer is not None:
            self.outer.resume(self.step)
        self._start()
        batches = iter(self.dataloader)
        with profilers(config, self.step) as profiling:
            while self.step < config.training.steps and not self.stopped_by:
                self.step += 1
                self.gc_handler.run(self.step)
                self.train_step(batches)
                self.checkpointer.save(self.step, last_step=self.step == config.training.steps)
                if self._validates():
                    self.validate()
                for profiler in profiling:
                    profiler.step()
                if self.step == self._first_step + 1:  # all ranks have ended it
                    self._set_timeouts(config.comm.train_timeout_seconds)
        if self.stopped_by:
            self.checkpointer.save_interrupted(self.step)
        self._end()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Take one optimizer step over all micro-batches of this rank, in eight parts.

        Between the first and the last part the host does not wait for the device, unless an
        optimizer cannot read the verdict there (`step_unless`), or a save still copies the states.
        """
        began = time.perf_counter()
        logs = self.metrics_processor.should_log(self.step)
        another_follows = self.step < self.job_config.training.steps
        schedule = self.lr_schedulers.schedulers[0]  # which all rates follow
        factor = schedule.lr_lambdas[0](schedule.last_epoch)

        # 1. Receive this rank's micro-batches. All but a process's first were read before.
        data = self.take(data_iterator)
        with self._measured(logs) as ledger:
            # 2. Forward and backward of each micro-batch. A replay calls no collective that the
            # ledger could count.
            eager = ledger is not None and self.parallel_dims.world_size > 1
            self.watch.measures = logs and self.watch.compares and (eager or self.graph is None)
            self.loss = self.backward(data, eager)
            # 3. Wait for the sums of gradients. The ranks' shares add up to the squared norm.
            share = self.gradients.finish_sums()
            # 4. Collect the next step's micro-batches, while the device computes.
            ahead = self.reader.read_next(data_iterator).counts if another_follows else ()
            # 5. Accept or reject the step, in one all-reduce of all ranks.
            stop, late = self.stop.name is not None, self.checkpointer.is_late()
            verdict = decide(self.loss, share, stop, ahead, self._replica, self._apart, late)
            # 6. Scale the gradients down to the largest norm.
            self.gradients.clip(self.job_config.training.max_norm, verdict.norm)
            # 7. Change the weights, unless the step is rejected.
            self.apply(verdict)
        self.lr_schedulers.step()
        self._losses.append(self.loss)
        # 8. Read the verdict on the host. Only then an outer step may change the weights.
        findings = self.settle(data, verdict)
        with ledger or nullcontext():
            self.exchange(findings.rejected, ledger)

        if logs:
            self._log_step(data, findings.norm, factor, began)
        else:
            self.metrics_processor.seconds += time.perf_counter() - began

    def take(self, data_iterator: Iterator[Batch]) -> StepData:
        """Receive this step's ``({"input": (b, s)}, labels (b, s))``, and count their tokens."""
        self.optimizers.zero_grad()
        try:
            data = self.reader.take(data_iterator)
        except BadDataError as error:
            raise self._saved_before(error) from error
        # Of whole rows, which context-parallel ranks share.
        read = sum(labels.numel() for _, labels in data.microbatches) * self.parallel_dims.cp
        self.ntokens_seen += read
        self.metrics_processor.ntokens_since_last_log += read
        return data

    def backward(self, data: StepData, eager: bool = False) -> Tensor:
        """Run forward and backward of each micro-batch; return this rank's share of the loss.

        The loss of a micro-batch is its summed token loss divided by the valid tokens of the global
        batch. So the gradients sum to those of one process with the same batch. Of K replicas that
        train apart each has K times its share of them: their mean is that gradient.
        """
        self.gradients.begin()
        if self.graph is not None:
            self.graph.begin(shapes_of(data.microbatches), eager or not self.gradients.usual)
        # Filled on the device: `torch.tensor` would stop the host until its copy has arrived.
        divisor = torch.full((), data.global_tokens / self._apart, device=self.device)
        losses = []
        for index, batch in enumerate(data.microbatches):
            last = index == len(data.microbatches) - 1
            synchronize_gradients(self.model_parts, last)
            if self.parallel_dims.pp_enabled:  # it synchronizes itself, at the end of its batch
                self.pp_schedule.is_last_round = last
            tokens, labels, arguments = moved(batch, self.device)
            inputs = {"tokens": tokens, "labels": labels, "divisor": divisor, **arguments}
            with self.gradients.micro_batch(last):
                if self.graph is None:
                    losses.append(self.one_pass(**inputs))
                else:
                    losses.append(self.graph.run(self.one_pass, inputs, index == 0, last))
        # Sum in float64 on every rank: stages without the loss return a zero of another dtype.
        return torch.stack(losses).sum(dtype=torch.float64) / self._apart

    def one_pass(
        self, tokens: Tensor, labels: Tensor, divisor: Tensor, **arguments: Tensor
    ) -> Tensor:
        """Run forward and backward of one micro-batch, through a pipeline if there is one.

        Tokens and labels are (b, s), on the device. The result is the loss over `divisor`, a
        scalar; 0 without the last pipeline stage.
        """
        arguments |= loss_arguments(self.model_parts[0], labels)
        with self.train_context():
            if self.parallel_dims.pp_enabled:
                run = self.pp_schedule.forward_backward
                return run(tokens, labels, divisor, **arguments).detach()
            # No name keeps the model's output: its memory is free before backward.
            loss = self.loss_fn(self.model_parts[0](tokens, **arguments), labels) / divisor
            loss.backward()
        return loss.detach()

    def apply(self, verdict: Verdict) -> None:
        """Let the optimizers change the weights, unless the verdict rejects the step."""
        self.checkpointer.maybe_wait_for_staging()
        step_unless(verdict.rejected, self.optimizers)
        self._commit_residuals(verdict)

    def _commit_residuals(self, verdict: Verdict) -> None:
        may_skip = self.job_config.training.max_skipped_steps > 0
        for compressor in self._residuals.compressors:
            compressor.commit(verdict.rejected if may_skip else None)

    def repeat(self, data: StepData, verdict: Verdict) -> bool:
        """Run a rejected step again, unseen by later ones; return whether the loss is finite."""
        exchanges = [compressor.exchanges for compressor in self._residuals.compressors]
        self.optimizers.zero_grad()
        if self.graph is not None:  # the activations would need their memory twice
            self.graph.free()
        loss = self.backward(data, eager=True)
        self.gradients.finish_sums()
        self.gradients.settle(rejected=True)
        self._commit_residuals(verdict)
        for compressor, count in zip(self._residuals.compressors, exchanges, strict=True):
            compressor.exchanges = count
        return bool(loss.isfinite())

    def exchange(self, rejected: bool, ledger: CommLedger | None) -> None:
        """Take the outer step that follows this step, if one does, or raise a NonFiniteError."""
        if self.outer is None:
            return
        last = self.step == self.job_config.training.steps
        sending = ledger and ledger.scope(OUTER)
        if not self.outer.after(self.step, last, sending, rejected):
            raise self._not_finite("an exchange of the replicas' weights is not finite")

    def settle(self, data: StepData, verdict: Verdict) -> Findings:
        """End the step: set ``stopped_by``, count a skipped step, or raise a NonFiniteError.

        Reading the verdict waits for it, but not for the optimizer.
        """
        findings = verdict.read()
        self.reader.next_sums = findings.next_counts
        self.gradients.settle(findings.rejected)
        self.checkpointer.overdue = findings.save
        # A run that has reached its last step is not stopped.
        if findings.stop and self.step < self.job_config.training.steps:
            self.stopped_by = self.stop.name or "a signal on another rank"
        if not findings.rejected:
            return findings
        what, rank = "the global batch has no valid label (all are ignored)", None
        if data.global_tokens:  # else 0/0: the weights are not the cause
            repeat = partial(self.repeat, data, verdict)
            what, rank = self.origin.of(findings, self.gradients, repeat)
        if self.skipped_steps >= self.job_config.training.max_skipped_steps:
            raise self._not_finite(what, rank)
        self.skipped_steps += 1
        logger.warning("step %d: %s; optimizer step skipped", self.step, what)
        return findings

    def _not_finite(self, what: str, rank: int | None = None) -> NonFiniteError:
        good = self.checkpointer.newest() or "none"
        line = f"step {self.step}: {what}; last good checkpoint: {good}"
        return NonFiniteError(line, rank, self.step)

    def validate(self) -> None:
        """Validate; a run that is stopped while a read does not return ends."""
        self.validator.stopping = self.dataloader.stopping
        self.validator.validate(self.model_parts, self.step)
        if self.validator.cut:
            self.stopped_by = self.stop.name or "a signal on another rank"

    def state_dict(self) -> dict[str, Any]:
        """Return the train state; tokens are summed over ranks, so any dp size can resume."""
        return {
            "step": self.step,
            "ntokens_seen": self.ntokens_seen * self._batch_degree,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a train state saved at any dp size."""
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"] // self._batch_degree
        self.skipped_steps = state_dict["skipped_steps"]

    def close(self) -> None:
        """End what runs beside training: worker processes, saving, logging."""
        if self.graph is not None:
            self.graph.free()
        self.dataloader.close()
        super().close()

    def _start(self) -> None:
        """Write and print what is known of the run once its checkpoint is loaded."""
        self.before_start()
        changed = self.write_record() or self.job_config.checkpoint.load_step != -1
        self._first_step = self.step
        self.metrics_processor.start_after(self.step, self.checkpointer.run, differs=changed)
        self._report_start()
        # The previous run may have been stopped between a save and its validation. Rank 0 alone
        # has a history.
        if self.step and self._validates() and not from_first_rank(self._has_validated()):
            self.validate()

    def write_record(self) -> bool:
        """Write the run's configuration into the dump folder; return whether losses change."""
        if dist.get_rank() != 0:
            return False
        record = run_record.run_record(self.job_config, self.parallel_dims.world_size)
        resumed, changes = self.checkpointer.resumed, dict[str, list[Any]]()
        if resumed is not None:
            changes = run_record.changed(resumed.run, record, self.checkpointer.excluded)
            past = list(resumed.run.get(run_record.CHANGES, []))
            if changes:
                past.append({"after_step": self.step, **changes})
                console.info("After step %d: %s", self.step, run_record.described(changes))
            record |= {run_record.CHANGES: past} if past else {}
        run_record.write_record(self.job_config, record)
        self.checkpointer.run = record
        return run_record.changes_losses(changes)

    def _report_start(self) -> None:
        """Print the first lines of the console: model, layout, batch and first step."""
        config, dims = self.job_config, self.parallel_dims
        parameters = sum(p.numel() for part in self.model_parts for p in part.parameters())
        if (stages := dims.get_optional_mesh("pp")) is not None:
            parameters = sum(from_all_ranks(parameters, stages.get_group()))
        args, rank = self.model_parts[0].model_args, ""
        if isinstance(args, LlamaArgs) and args.low_rank:  # low_rank.rank = 0 is the flavor's
            ranks = dict.fromkeys((args.rank_attention, args.rank_ffn))
            rank = f", rank {' and '.join(map(str, ranks))}"
        console.info(f"{config.model.name} {config.model.flavor}: {parameters:,} parameters{rank}")
        rows = run_record.global_batch_size(config, dims.world_size)
        length = config.training.seq_len
        layout = described_layout(dims)
        console.info(f"{layout}: {rows:,} sequences of {length:,} tokens per step")
        if self.outer is not None:
            who = f"{dims.dp_replicate} replicas exchange {config.outer.bits} bits per number"
            if dims.dp_replicate == 1:
                who = "one replica, which sends nothing, steps"
            meanwhile = ", while the next step computes" if config.outer.overlap else ""
            console.info(f"outer steps: {who} every {config.outer.every} steps{meanwhile}")
        console.info(f"Training starts at step {self.step + 1}")
        if config.compile.enable:
            console.info("The first step compiles the model, which may take minutes")

    def _end(self) -> None:
        """Write the summary of a run that is complete, or say how a stopped one goes on."""
        saved = self.checkpointer.newest()
        if not self.stopped_by:
            self.metrics_processor.write_summary(self.step, saved)
        elif dist.get_rank() == 0:
            how = "run the same command again to resume" if saved else "checkpointing is off"
            if saved and self.job_config.checkpoint.load_step != -1:
                how = "run the command again without checkpoint.load_step to resume"
            if self.stopped_by == MACHINES_CHANGED:
                how = "the run goes on by itself"
            total = self.job_config.training.steps
            what = "Stopped by %s after step %d of %d, checkpoint %s: %s"
            console.info(what, self.stopped_by, self.step, total, saved, how)

    def _validates(self) -> bool:
        """Return whether a validation follows this step; a run that is to stop has no time."""
        enabled = self.job_config.validation.enable and not self.stopped_by
        return enabled and self.validator.should_validate(self.step)

    def _has_validated(self) -> bool:
        if (log := self.metrics_processor.history) is None:
            return False
        records = history.read_history(log)
        return any(r["step"] == self.step and history.VALIDATION_LOSS in r for r in records)

    def _set_timeouts(self, seconds: int) -> None:
        # Upstream does so after step 1 alone, not after a resumed run's first, and only for some
        # groups. Saves keep theirs: ranks wait for one another's storage.
        set_timeouts(timedelta(seconds=seconds), getattr(self.checkpointer, "pg", None))

    def _saved_before(self, error: BadDataError) -> BadDataError:
        """Save the state before this step; say so in the error. Call it on every rank."""
        failed = self.step
        self.step -= 1
        saved = self.checkpointer.newest()
        if self.step > self._first_step:
            saved = self.checkpointer.save_interrupted(self.step)
        how = f"saved as {saved}" if saved else "nothing was saved"
        how += ": repair it and run the same command again"
        return BadDataError(f"step {failed}: {error}; {how}", error.rank, failed)

    def _measured(self, logs: bool) -> AbstractContextManager[CommLedger | None]:
        """Count what a logged step sends and compresses."""
        for compressor in self._residuals.compressors:
            compressor.measuring = logs
        if not (logs and self.job_config.metrics.comm_ledger):
            return nullcontext()
        self._ledger = self._ledger or self.new_ledger()
        self._ledger.clear()
        return self._ledger

    def new_ledger(self) -> CommLedger:
        """Build a ledger of this run's collectives."""
        owned = ENTRIES[self.job_config.optimizer.name].sums_replicas
        replicas = ("dp_replicate",) if owned else ()
        meshes = self.parallel_dims.get_all_one_dimensional_meshes()
        groups = {name: mesh.get_group() for name, mesh in meshes.items()}
        summing = [each for each in self.optimizers if hasattr(each, "named_groups")]
        for optimizer in summing:
            groups |= optimizer.named_groups()
        return CommLedger(self.model_parts, groups, replicas, summing)

    def _log_step(self, data: StepData, norm: float, factor: float, began: float) -> None:
        """Log the step that has ended, with a factor on its rates; call it on every rank."""
        loss, since_last = self.loss.clone(), torch.stack(self._losses).mean()
        self._losses.clear()
        mesh = self.parallel_dims.get_optional_mesh("loss")
        if (pipeline := self.parallel_dims.get_optional_mesh("pp")) is not None:
            # Only the last stage has the loss; rank 0 needs it for logging.
            dist.all_reduce(loss, group=pipeline.get_group())
            dist.all_reduce(since_last, group=pipeline.get_group())
        token_share = data.tokens / data.global_tokens if data.global_tokens else math.nan
        # A rank without valid tokens has no mean loss.
        own = loss / token_share if token_share else torch.full_like(loss, -math.inf)
        counted: Counter[str] = Counter()
        for row in [] if self._ledger is None else self._ledger.rows():
            counted[row["mesh_dim"]] += row["bytes"]
        # Their reads wait for the optimizer, whose time counts.
        mean, most = dist_utils.dist_sum(loss, mesh), dist_utils.dist_max(own, mesh)
        metrics = {
            history.TOKENS_SEEN: self.ntokens_seen * self._batch_degree,
            **{name: rate * factor for name, rate in self.rates.items()},
            history.INTERVAL_LOSS: dist_utils.dist_sum(since_last, mesh),
            "skipped_steps": self.skipped_steps,
            **self.reader.metrics(data),
            **self.watch.metrics(),
            **{f"{history.COMM_BYTES}{dim}": size for dim, size in sorted(counted.items())},
            **self._residuals.metrics(),
        }
        self.metrics_processor.seconds += time.perf_counter() - began
        self.metrics_processor.log(self.step, mean, most, norm, metrics)


class StopSignal:
    """Records a signal to stop, so that the trainer can finish and save its step."""

    name: str | None = None  # the received signal, or `MACHINES_CHANGED`; None until one arrives

    def install(self) -> None:
        """Handle the signals; a second one has its default action, below torchrun none."""
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
        # A scheduler signals all processes of a job: a rank gets its signal and the launcher's.
        later = signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL

        def receive(number: int, frame: FrameType | None) -> None:
            name = signal.Signals(number).name
            self.name = MACHINES_CHANGED if number == signal.SIGUSR2 else name
            for other in numbers:
                signal.signal(other, later)

        for number in numbers:
            signal.signal(number, receive)
