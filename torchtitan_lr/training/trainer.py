# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's trainer with checks of every step, clean interruption and a final summary."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_lr.agreement import first_rank_where, from_all_ranks, from_first_rank
from torchtitan_lr.checkpoints import run_record
from torchtitan_lr.checkpoints.folders import RESIDUALS, RUN_CONFIG, write_whole
from torchtitan_lr.checkpoints.record import describe
from torchtitan_lr.compat.process_groups import set_timeouts
from torchtitan_lr.compression.units import Residuals, compressors_of
from torchtitan_lr.console.log import console
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.llama import loss_arguments
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.optim.groups import LoggedRates, rates_of
from torchtitan_lr.parallel.context import context_ranks
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, ParallelDims, dist_utils
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.titan.trainer_parts import Trainer as TitanTrainer
from torchtitan_lr.titan.trainer_parts import profilers, trainer_parts
from torchtitan_lr.training import figures, history
from torchtitan_lr.training.checkpoint import CheckpointManager
from torchtitan_lr.training.fingerprint import identity_of, tokenizer_digest
from torchtitan_lr.training.metrics import LowRankMetricsProcessor
from torchtitan_lr.training.reader import BadDataError, StepReader, check_same_data
from torchtitan_lr.training.signals import MACHINES_CHANGED, StopSignal
from torchtitan_lr.training.step import Step
from torchtitan_lr.training.step_graph import Capture, CudaCapture, why_eager
from torchtitan_lr.training.validate import Validator
from torchtitan_lr.training.verdict import NonFiniteError


class Trainer(TitanTrainer):
    """torchtitan's Trainer with its own step, start and end of training."""

    checkpointer: CheckpointManager
    dataloader: TokenDataLoader
    metrics_processor: LowRankMetricsProcessor
    pp_schedule: Pipeline
    validator: Validator
    ntokens_seen: int

    def __init__(self, job_config: JobConfig) -> None:
        bind_device()
        self.before_start: Callable[[], None] = lambda: None  # called with the checkpoint loaded
        self.more_summary: Callable[[], dict[str, Any]] = dict
        self.skipped_steps = 0  # for a non-finite loss or gradient; checkpointed
        self.stopped_by: str | None = None  # the name of a signal
        self._stop = StopSignal()
        self._losses: list[torch.Tensor] = []  # of the steps since the last logged one
        self._first_step = 0
        self._ledger: CommLedger | None = None
        # Prevent upstream from writing the record now: the checkpoint check may still raise, and
        # must leave the record of the existing checkpoints unchanged.
        record_file, job_config.job.save_config_file = job_config.job.save_config_file, None
        if not torch.cuda.is_available():
            job_config.comm.trace_buf_size = 0  # NCCL's traces; their folder would stay empty
        # Use our checkpoint manager and no autocast: FSDP or DDP implements mixed precision at
        # every world size.
        with trainer_parts(CheckpointManager):
            super().__init__(job_config)
        job_config.job.save_config_file = record_file or RUN_CONFIG
        self._set_timeouts(job_config.comm.init_timeout_seconds)
        check_same_data(self.dataloader.dataset.identity)
        dims = self.parallel_dims
        self._batch_degree = dims.dp_replicate * dims.dp_shard
        half = job_config.training.mixed_precision_param != "float32"
        tf32 = ENTRIES[job_config.optimizer.name].tf32_products
        if self.device.type == "cuda" and half and tf32:
            # The optimizer's are the only fp32 products of such a run (docs/step.md).
            torch.set_float32_matmul_precision("high")
        path = job_config.model.hf_assets_path
        digest = from_first_rank(tokenizer_digest(path) if dist.get_rank() == 0 else "")
        args = self.model_parts[0].model_args
        self.checkpointer.identity = {
            **identity_of(job_config, dims.world_size, args, digest),
            "dataloader": self.dataloader.dataset.identity,
        }
        self._residuals = Residuals(compressors_of(self.model_parts))
        if self._residuals.compressors:
            self.checkpointer.states[RESIDUALS] = self._residuals
            for compressor in self._residuals.compressors:
                compressor.before_writing = self.checkpointer.maybe_wait_for_staging
        self.rates = self.build_rates()
        self.running_step = self.build_step()

    def build_rates(self) -> LoggedRates:
        """Find the names of the rates that all ranks log."""
        section = self.job_config.optimizer
        shapes = {n: tuple(p.shape) for n, p in trained_parameters(*self.model_parts).items()}
        if section.groups:  # some may have parameters on other pipeline stages alone
            shapes = model_shapes(self.model_parts[0].model_args)
        return LoggedRates(section, rates_of(section, shapes))

    def build_step(self) -> Step:
        """Build the `Step` of this rank's model parts and optimizers."""
        dims, pipelined = self.parallel_dims, self.parallel_dims.pp_enabled
        # An optimizer that sums over the replicas itself has gradients of its own.
        gradients = getattr(self.optimizers, "gradients", None) or StoredGradients(
            self.model_parts, dims.get_optional_mesh("pp")
        )
        return Step(
            job_config=self.job_config,
            device=self.device,
            model_parts=self.model_parts,
            pipeline=self.pp_schedule if pipelined else None,
            optimizers=self.optimizers,
            gradients=gradients,
            reader=StepReader(
                self.dataloader,
                self.device,
                dims.tp * dims.pp,
                context_ranks(dims),
                self.metrics_processor.data_loading_times,
            ),
            compressors=self._residuals.compressors,
            before_change=self.checkpointer.maybe_wait_for_staging,
            capture=self._capture(),
        )

    def _capture(self) -> Capture | None:
        """Return what records the passes of steps, or None where they run eagerly."""
        reason = why_eager(self.job_config, self.device.type)
        if self.device.type == "cuda" and self.job_config.training.step_graph != "off":
            how = "eager" if reason else "captured after the first steps"
            logger.info("Passes of a step: %s", f"{how}: {reason}" if reason else how)
        return None if reason else CudaCapture()

    @record
    def train(self) -> None:
        """Train to ``training.steps`` or to a stop signal, then save and report."""
        self._stop.install()
        self.dataloader.stopping = lambda: self._stop.name is not None
        config = self.job_config
        self.checkpointer.load(step=config.checkpoint.load_step)
        self._start()
        batches = iter(self.dataloader)
        with profilers(config, self.step) as profiling:
            while self.step < config.training.steps and not self.stopped_by:
                self.step += 1
                self.gc_handler.run(self.step)
                self.train_step(batches)
                self.checkpointer.save(self.step, last_step=self.step == config.training.steps)
                if config.validation.enable and self.validator.should_validate(self.step):
                    self.validator.validate(self.model_parts, self.step)
                for profiler in profiling:
                    profiler.step()
                if self.step == self._first_step + 1:  # all ranks have ended it
                    self._set_timeouts(config.comm.train_timeout_seconds)
        if self.stopped_by:
            self.checkpointer.save_interrupted(self.step)
        self._report_end()

    def _start(self) -> None:
        """Write and print what is known of the run once its checkpoint is loaded."""
        self.before_start()
        changed = self.write_record()
        self._first_step = self.step
        goes_back = self.job_config.checkpoint.load_step != -1
        self.metrics_processor.start_after(self.step, differs=changed or goes_back)
        self._report_start()
        self._make_up_for_validation()

    def _report_end(self) -> None:
        """Write the summary of a run that is complete, or say how a stopped one goes on."""
        saved = self.checkpointer.newest()
        if not self.stopped_by:
            self.write_summary(saved)
        elif dist.get_rank() == 0:
            how = "run the same command again to resume" if saved else "checkpointing is off"
            if saved and self.job_config.checkpoint.load_step != -1:
                how = "run the command again without checkpoint.load_step to resume"
            if self.stopped_by == MACHINES_CHANGED:
                how = "the run goes on by itself"
            total = self.job_config.training.steps
            what = "Stopped by %s after step %d of %d, checkpoint %s: %s"
            console.info(what, self.stopped_by, self.step, total, saved, how)

    def close(self) -> None:
        """End what runs beside training: worker processes, saving, logging."""
        if self.running_step.graph is not None:
            self.running_step.graph.free()
        self.dataloader.close()
        super().close()

    def _set_timeouts(self, seconds: int) -> None:
        # Upstream does so after step 1 alone, not after a resumed run's first, and only for some
        # groups. Saves keep theirs: ranks wait for one another's storage.
        set_timeouts(timedelta(seconds=seconds), getattr(self.checkpointer, "pg", None))

    def write_record(self) -> bool:
        """Write the run's configuration into the dump folder, after all checks have passed."""
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

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run one optimizer step over all micro-batches of this rank; see `Step`."""
        self.metrics_processor.resume()
        began = time.monotonic()
        step = self.running_step
        another_follows = self.step < self.job_config.training.steps
        rates = self.rates.of_step(self.lr_schedulers.schedulers[0])
        try:
            data = step.take(data_iterator)
        except BadDataError as error:
            raise self._saved_before(error) from error
        # Of whole rows, which context-parallel ranks share.
        read = sum(labels.numel() for _, labels in data.microbatches) * self.parallel_dims.cp
        self.ntokens_seen += read
        self.metrics_processor.ntokens_since_last_log += read

        logs = self.metrics_processor.should_log(self.step)
        with self._measured(logs):
            # A replay calls no collective that the ledger could count.
            counted = self._ledger is not None and logs and self.parallel_dims.world_size > 1
            step.backward(self.forward_backward_step, eager=counted)
            step.finish_sums()
            step.read_ahead(data_iterator if another_follows else None)
            step.decide(self._stop.name is not None)
            step.clip()
            step.apply()
        self.lr_schedulers.step()
        self._losses.append(step.loss)  # on the device: the host does not wait for it
        self._settle()
        if self.job_config.compile.enable and self.step == self._first_step + 1:
            seconds = time.monotonic() - began
            console.info("The first step took %.1f s, with the compilation", seconds)
        if logs:
            self._log_step(rates)
        # Validation and saving, until the next step, do not count as training time.
        self.metrics_processor.pause()

    def _settle(self) -> None:
        """End the step: set ``stopped_by``, count a skipped step, or raise a NonFiniteError."""
        findings = self.running_step.settle()
        # A run that has reached its last step is not stopped.
        if findings.stop and self.step < self.job_config.training.steps:
            self.stopped_by = self._stop.name or "a signal on another rank"
            if self.job_config.validation.enable:
                self.validator.suspended = True
        if not findings.rejected:
            return
        what, rank = self.running_step.fault(findings)
        if self.skipped_steps >= self.job_config.training.max_skipped_steps:
            good = self.checkpointer.newest(finite=True) or "none"
            line = f"step {self.step}: {what}; last good checkpoint: {good}"
            raise NonFiniteError(line, rank, self.step)
        self.skipped_steps += 1
        logger.warning("step %d: %s; optimizer step skipped", self.step, what)

    def _measured(self, logs: bool) -> AbstractContextManager[object]:
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

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch, through a pipeline if there is one.

        Inputs and labels are (b, s), on the device. `global_valid_tokens` divides the loss. The
        result is a scalar; 0 without the last pipeline stage.
        """
        arguments = input_dict | loss_arguments(self.model_parts[0], labels)
        tokens = arguments.pop("input")
        with self.train_context():
            if self.parallel_dims.pp_enabled:
                run = self.pp_schedule.forward_backward
                return run(tokens, labels, global_valid_tokens, **arguments)
            # No name keeps the model's output: its memory is free before backward.
            loss = self.loss_fn(self.model_parts[0](tokens, **arguments), labels)
            loss = loss / global_valid_tokens
            loss.backward()
        return loss

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
        console.info(f"Training starts at step {self.step + 1}")
        if config.compile.enable:
            console.info("The first step compiles the model, which may take minutes")

    def _saved_before(self, error: BadDataError) -> BadDataError:
        """Save the state before this step; say so in the error. Call it on every rank."""
        failed = self.step
        self.step -= 1
        saved = self.checkpointer.newest(finite=True)
        if self.step > self._first_step:
            saved = self.checkpointer.save_interrupted(self.step)
        how = f"saved as {saved}" if saved else "nothing was saved"
        how += ": repair it and run the same command again"
        return BadDataError(f"step {failed}: {error}; {how}", error.rank, failed)

    def _log_step(self, rates: dict[str, float]) -> None:
        """Log the step that has ended; call it on every rank."""
        data, loss = self.running_step.data, self.running_step.loss.clone()
        mesh = self.parallel_dims.get_optional_mesh("loss")
        pipeline = self.parallel_dims.get_optional_mesh("pp")
        since_last = torch.stack(self._losses).mean()
        self._losses.clear()
        if pipeline is not None:
            # Only the last stage has the loss; rank 0 needs it for logging.
            dist.all_reduce(loss, group=pipeline.get_group())
            dist.all_reduce(since_last, group=pipeline.get_group())
        token_share = data.tokens / data.global_tokens if data.global_tokens else math.nan
        # A rank without valid tokens has no mean loss.
        own = loss / token_share if token_share else torch.full_like(loss, -math.inf)
        counted: Counter[str] = Counter()
        for row in [] if self._ledger is None else self._ledger.rows():
            counted[row["mesh_dim"]] += row["bytes"]
        self.metrics_processor.log(
            self.step,
            dist_utils.dist_sum(loss, mesh),
            dist_utils.dist_max(own, mesh),
            self.running_step.verdict.norm.item(),
            extra_metrics={
                history.TOKENS_SEEN: self.ntokens_seen * self._batch_degree,
                **rates,
                history.INTERVAL_LOSS: dist_utils.dist_sum(since_last, mesh),
                "skipped_steps": self.skipped_steps,
                **self.running_step.reader.metrics(),
                **{f"{history.COMM_BYTES}{dim}": size for dim, size in sorted(counted.items())},
                **self._residuals.metrics(),
            },
        )

    def _make_up_for_validation(self) -> None:
        """Validate now if the previous run was stopped between a save and its validation."""
        enabled = self.step and self.job_config.validation.enable
        if not enabled or not self.validator.should_validate(self.step):
            return
        # Rank 0 alone has a history: all ranks ask whether any of them knows the loss.
        known = False
        if (log := self.metrics_processor.history) is not None:
            records = history.read_history(log.path)
            known = any(r["step"] == self.step and history.VALIDATION_LOSS in r for r in records)
        if first_rank_where(known) is None:
            self.validator.validate(self.model_parts, self.step)

    def write_summary(self, checkpoint: str | None) -> None:
        """Write the summary, which names the newest checkpoint, and the curve, on rank 0."""
        processor, job_config = self.metrics_processor, self.job_config
        memory = processor.device_memory_monitor.get_peak_stats().max_reserved_gib
        peak = torch.tensor(memory, dtype=torch.float64, device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if processor.history is None:
            return
        file = Path(job_config.job.dump_folder) / history.SUMMARY_FILE
        records = history.read_history(processor.history.path)
        curve = file.with_name(history.CURVE_FILE)
        what = job_config.job.description or f"{job_config.model.name} {job_config.model.flavor}"
        figures.draw_curve(records, curve, f"{what}, {described_layout(self.parallel_dims)}")
        summary = history.build_summary(records, self.step, peak.item(), checkpoint)
        summary["curve"] = str(curve)
        try:
            summary |= self.more_summary()
        except Exception as error:  # the steps are trained and saved
            logger.warning("The summary lacks what a formula fails to give: %s", describe(error))
        write_whole(file, json.dumps(summary, indent=2) + "\n")
        logger.info("Summary written to %s", file)
        processor.logger.publish(summary, curve)


def described_layout(dims: ParallelDims) -> str:
    """Return the parallel degrees in words, such as ``4 ranks (dp_shard 2, tp 2)``."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    degrees = ((name, getattr(dims, name)) for name in names)
    split = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    return "1 rank" if dims.world_size == 1 else f"{dims.world_size} ranks ({split})"
