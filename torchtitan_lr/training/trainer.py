# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's trainer with checks of every step, clean interruption and a final summary."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lr.checkpoints.layout import RESIDUALS, RUN_CONFIG, write_whole
from torchtitan_lr.checkpoints.manifest import from_first_rank
from torchtitan_lr.checkpoints.run_record import described, global_batch_size, write_record
from torchtitan_lr.compat.collectives import set_timeouts
from torchtitan_lr.compression.fsdp import compressors_of
from torchtitan_lr.compression.residuals import Residuals
from torchtitan_lr.config.schema import TSR
from torchtitan_lr.console.log import console
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.data.dataloader import TokenDataLoader
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import loss_arguments
from torchtitan_lr.optim.step import StoredGradients, step_unless
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.parallel.data_parallel import (
    OwnGradients,
    fsdp_modules,
    synchronize_gradients,
)
from torchtitan_lr.parallel.pipeline import Pipeline
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, ParallelDims, dist_utils
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.titan.trainer import Trainer as TitanTrainer
from torchtitan_lr.titan.trainer import trainer_parts
from torchtitan_lr.training import guard, history
from torchtitan_lr.training.checkpoint import CheckpointManager
from torchtitan_lr.training.fingerprint import TOKENIZER, model_fingerprint, tokenizer_digest
from torchtitan_lr.training.metrics import LowRankMetricsProcessor
from torchtitan_lr.training.validate import Validator


class Trainer(TitanTrainer):
    """torchtitan's Trainer with its own step, start and end of training.

    Attributes:
        before_start: Called when the checkpoint is loaded and the first step follows.
        skipped_steps: Optimizer steps skipped for a non-finite loss or gradient; checkpointed.
        stopped_by: Name of the signal that ended the run early, None if none has.
    """

    checkpoint_manager: type[CheckpointManager] = CheckpointManager
    checkpointer: CheckpointManager
    dataloader: TokenDataLoader
    metrics_processor: LowRankMetricsProcessor
    pp_schedule: Pipeline
    validator: Validator
    ntokens_seen: int

    def __init__(self, job_config: JobConfig) -> None:
        bind_device()
        self.before_start: Callable[[], None] = lambda: None
        self.skipped_steps = 0
        self.stopped_by: str | None = None
        self._stop = guard.StopSignal()
        # Number, verdict and valid tokens of the last step, until the host has read the verdict.
        self._unread: tuple[int, guard.Verdict, float] | None = None
        self._losses: list[torch.Tensor] = []  # of the steps since the last logged one
        self._started = False
        self._first_step = 0
        self._ledger: CommLedger | None = None
        # Prevent upstream from writing the record now: the checkpoint check may still raise, and
        # must leave the record of the existing checkpoints unchanged.
        record, job_config.job.save_config_file = job_config.job.save_config_file, None
        # Use our checkpoint manager and no autocast: FSDP or DDP implements mixed precision at
        # every world size.
        with trainer_parts(self.checkpoint_manager):
            super().__init__(job_config)
        job_config.job.save_config_file = record or RUN_CONFIG
        self._set_timeouts(job_config.comm.init_timeout_seconds)
        guard.check_same_data(self.dataloader.dataset.identity)
        dims = self.parallel_dims
        self._reader = guard.StepReader(
            self.dataloader,
            self.device,
            dims.non_data_parallel_size,
            self.metrics_processor.data_loading_times,
        )
        self._batch_degree = dims.dp_replicate * dims.dp_shard
        stages = dims.get_optional_mesh("pp")
        self._gradients: StoredGradients | TSROptimizers
        self._gradients = StoredGradients(self.model_parts, stages)
        self._own_gradients = OwnGradients(self.model_parts)
        if isinstance(self.optimizers, TSROptimizers):  # it reduces them itself
            self._gradients = self.optimizers
            if (
                self.device.type == "cuda"
                and job_config.training.mixed_precision_param != "float32"
            ):
                # TSR-Adam's are the only fp32 products of such a run. In TF32 they are faster, with
                # errors below those that bf16 leaves in the gradients (docs/numerics.md).
                torch.set_float32_matmul_precision("high")
        args = self.model_parts[0].model_args
        if isinstance(args, LlamaArgs):
            path = job_config.model.hf_assets_path
            digest = from_first_rank(tokenizer_digest(path) if dist.get_rank() == 0 else "")
            self.checkpointer.fingerprint = model_fingerprint(args) | {TOKENIZER: digest}
        self._residuals = Residuals(compressors_of(self.model_parts))
        if self._residuals.compressors and job_config.grad_compression.save_residuals:
            self.checkpointer.states[RESIDUALS] = self._residuals
            for compressor in self._residuals.compressors:
                compressor.before_writing = self.checkpointer.maybe_wait_for_staging

    def train(self) -> None:
        """Train to ``training.steps`` or to a stop signal, then save and report."""
        self._stop.install()
        super().train()
        saved = self.checkpointer.newest()
        if not self.stopped_by:
            self.write_summary(saved)
        elif dist.get_rank() == 0:
            how = "run the same command again to resume" if saved else "checkpointing is off"
            if saved and self.job_config.checkpoint.load_step != -1:
                how = "run the command again without checkpoint.load_step to resume"
            if self.stopped_by == guard.MACHINES_CHANGED:
                how = "the run goes on by itself"
            total = self.job_config.training.steps
            what = "Stopped by %s after step %d of %d, checkpoint %s: %s"
            console.info(what, self.stopped_by, self.step, total, saved, how)

    def close(self) -> None:
        """End what runs beside training: worker processes, saving, logging."""
        self.dataloader.close()
        super().close()

    def should_continue_training(self) -> bool:
        """Return whether another step follows; upstream calls it after loading and per step."""
        if not self._started:
            self._started = True
            self.before_start()
            self.write_record()
            self._first_step = self.step
            self.metrics_processor.start_after(self.step)
            self._report_start()
            self._make_up_for_validation()
        self._settle()
        if self.step == self._first_step + 1:  # which all ranks have ended: the verdict is a sum
            self._set_timeouts(self.job_config.comm.train_timeout_seconds)
        if self.stopped_by:
            self.checkpointer.save_interrupted(self.step)
            return False
        return super().should_continue_training()

    def _set_timeouts(self, seconds: int) -> None:
        # Upstream does so after step 1 alone, not after a resumed run's first, and only for some
        # groups. Saves keep theirs: ranks wait for one another's storage.
        set_timeouts(timedelta(seconds=seconds), getattr(self.checkpointer, "pg", None))

    def write_record(self) -> None:
        """Write the run's configuration into the dump folder, after all checks have passed."""
        if dist.get_rank() == 0:
            changes = write_record(self.job_config, self.step, self.parallel_dims.world_size)
            if changes:
                console.info("After step %d: %s", self.step, described(changes))

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Return the batches alone: upstream counts the tokens of what is read ahead too."""
        return iter(data_iterable)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run one optimizer step over all micro-batches of this rank, and read the next one's.

        The loss of each micro-batch is its summed token loss divided by the valid tokens of the
        global batch, so the gradients sum to those of one process with the same batch. The
        iterator yields ``({"input": (b, s)}, labels (b, s))``.

        Raises:
            NonFiniteError: As for `_settle`.
            BadDataError: If any rank cannot read its data; raised on all of them.
            DataloaderExhaustedError: If a rank has no more data; likewise.
        """
        self.metrics_processor.resume()
        self._settle()  # before the gradients are gone, by which a rejected step is explained
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        data = self._reader.take(data_iterator, self.gradient_accumulation_steps)
        if data.problem is not None:
            self._stop_for_data(data.problem)
        global_tokens = data.global_tokens
        read = sum(labels.numel() for _, labels in data.microbatches)
        self.ntokens_seen += read
        self.metrics_processor.ntokens_since_last_log += read

        logs = self.metrics_processor.should_log(self.step)
        for compressor in self._residuals.compressors:
            compressor.measuring = logs
        counted: AbstractContextManager[object] = nullcontext()
        if logs and self.job_config.metrics.comm_ledger:
            counted = self._ledger = self._ledger or self.new_ledger()
            self._ledger.clear()
        with counted:
            loss = self._forward_backward(data.microbatches, global_tokens)
            self._losses.append(loss.clone())  # on the device: the host does not wait for them
            share = self._gradients.reduce_and_square_norm()
            counts: tuple[float, ...] = ()
            if self.step < self.job_config.training.steps:  # while the device computes
                ahead = self._reader.read_ahead(data_iterator, self.gradient_accumulation_steps)
                counts = ahead.counts
            verdict = guard.Verdict(loss, share, self._stop.name is not None, counts)
            self._gradients.clip(self.job_config.training.max_norm, verdict.norm)
            self.checkpointer.maybe_wait_for_staging()
            step_unless(verdict.rejected, self.optimizers)
            may_skip = self.job_config.training.max_skipped_steps > 0
            for compressor in self._residuals.compressors:
                compressor.commit(verdict.rejected if may_skip else None)
        self._unread = self.step, verdict, global_tokens
        self.lr_schedulers.step()
        # Logging, saving and validating need the verdict now.
        saves = self.checkpointer.is_due(self.step, self.step >= self.job_config.training.steps)
        validates = self.job_config.validation.enable and self.validator.should_validate(self.step)
        if logs or saves or validates:
            self._settle()
        if logs:
            token_share = data.tokens / global_tokens if global_tokens else math.nan
            self._log_step(loss, token_share, verdict.norm, lr)
        # Validation and saving, until the next step, do not count as training time.
        self.metrics_processor.pause()

    def new_ledger(self) -> CommLedger:
        """Build a ledger of this run's collectives."""
        replicas = ("dp_replicate",) if self.job_config.optimizer.name == TSR else ()
        meshes = self.parallel_dims.get_all_one_dimensional_meshes()
        groups = {name: mesh.get_group() for name, mesh in meshes.items()}
        return CommLedger(self.model_parts, groups, replicas)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Split a batch as upstream does, but give every pipeline stage all of the arguments.

        The labels are one of them, for a head that computes the loss.
        """
        inputs, labels, extra, common = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, {}, common | extra | loss_arguments(self.model_parts[0], labels)

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run a micro-batch ``{"input": (b, s), ...}``, labels (b, s), through a pipeline if any.

        Returns:
            This rank's share of the loss, a scalar; 0 without the last pipeline stage.
        """
        whole = global_valid_tokens
        if self.parallel_dims.pp_enabled:
            # Upstream divides the reported loss, but not the loss that the pipeline backpropagates.
            self.pp_schedule.tokens = global_valid_tokens
            whole = torch.ones_like(global_valid_tokens)
        loss = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=whole
        )
        if self.parallel_dims.pp_enabled and not self.pp_has_last_stage:
            return torch.zeros_like(whole)
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
            counts = [0] * stages.size()
            dist.all_gather_object(counts, parameters, group=stages.get_group())
            parameters = sum(counts)
        args, rank = self.model_parts[0].model_args, ""
        if isinstance(args, LlamaArgs) and args.low_rank:  # low_rank.rank = 0 is the flavor's
            ranks = dict.fromkeys((args.rank_attention, args.rank_ffn))
            rank = f", rank {' and '.join(map(str, ranks))}"
        console.info(
            f"{config.model.name} {config.model.flavor}: {parameters:,} parameters{rank}, on "
            f"{layout(dims)}, {global_batch_size(config, dims.world_size):,} sequences of "
            f"{config.training.seq_len:,} tokens per step"
        )
        console.info(f"Training starts at step {self.step + 1}")
        if config.compile.enable and self.device.type == "cpu":
            console.info("The first step compiles the model: on a CPU that may take minutes")

    def _stop_for_data(self, why: str) -> None:
        """Save the state before this step, and raise a BadDataError on every rank."""
        failed = self.step
        self.step -= 1
        saved = self.checkpointer.newest(finite=True)
        if self.step > self._first_step:
            saved = self.checkpointer.save_interrupted(self.step)
        how = f"saved as {saved}" if saved else "nothing was saved"
        how += ": repair it and run the same command again"
        raise guard.BadDataError(f"step {failed}: {why}; {how}")

    def _forward_backward(self, microbatches: list[Batch], global_tokens: float) -> torch.Tensor:
        """Accumulate gradients; return this rank's share of the loss (detached scalar)."""
        losses = []
        self._own_gradients.clear()
        # Filled on the device: `torch.tensor` would stop the host until its copy has arrived.
        tokens = torch.full((), global_tokens, device=self.device)
        for index, (input_dict, labels) in enumerate(microbatches):
            last = index == len(microbatches) - 1
            synchronize_gradients(self.model_parts, last)
            if self.parallel_dims.pp_enabled:  # it synchronizes at the end of the batch
                self.pp_schedule.is_last_round = last
            self._gradients.prepare(last)
            loss = self.forward_backward_step(
                input_dict={k: v.to(self.device, non_blocking=True) for k, v in input_dict.items()},
                labels=labels.to(self.device, non_blocking=True),
                global_valid_tokens=tokens,
            )
            self._gradients.accumulate(last)
            losses.append(loss.detach())
        # Sum in float64 on every rank: stages without the loss return a zero of another dtype.
        return torch.stack(losses).sum(dtype=torch.float64)

    def _settle(self) -> None:
        """Read the last step's verdict, once: set ``stopped_by``, count a skipped step or raise.

        Call it on every rank: they find out together which one is the cause of a rejected step.

        Raises:
            NonFiniteError: The step was rejected, and ``training.max_skipped_steps`` is used up.
        """
        if self._unread is None:
            return
        (step, verdict, global_tokens), self._unread = self._unread, None
        findings = verdict.read()
        self._reader.sums = findings.counts
        self._gradients.repair_drift()
        # A run that has reached its last step is not stopped.
        if findings.stop and step < self.job_config.training.steps:
            self.stopped_by = self._stop.name or "a signal on another rank"
            if self.job_config.validation.enable:
                self.validator.suspended = True
        if not findings.rejected:
            return
        self._gradients.undo_step_counters()
        if not global_tokens:  # 0/0: the weights are not the cause
            what = "the global batch has no valid label (all are ignored)"
        elif findings.bad_losses:
            at = guard.first_rank_with(None if findings.loss_is_finite else "") or ""
            what = f"loss of {at.rstrip(': ')} is not finite"
        else:
            what = f"gradient norm is {findings.norm} ({self._where_not_finite()})"
        if self.skipped_steps >= self.job_config.training.max_skipped_steps:
            raise guard.NonFiniteError(
                f"step {step}: {what}; last good checkpoint: "
                f"{self.checkpointer.newest(finite=True) or 'none'}"
            )
        self.skipped_steps += 1
        logger.warning("step %d: %s; optimizer step skipped", step, what)

    def _where_not_finite(self) -> str:
        """Say which rank's backward made a gradient that is not finite; call it on every rank.

        A NaN spreads against the order of the layers: the last parameter that has one is nearest to
        its origin. Tensor-parallel ranks share sums in backward, so the first of them is named.
        """
        parts, stages = {0: self.model_parts[0]}, 1
        if self.parallel_dims.pp_enabled:
            parts = self.pp_schedule.parts
            stages = len(self.pp_schedule.boundaries(self.job_config.training.seq_len)) + 1
        sources = [("", self._gradients.nonfinite)]
        if fsdp_modules(self.model_parts):  # they leave sums over the ranks: a rank's own first
            sources = [
                ("", self._own_gradients.nonfinite),
                ("only in the sum over the ranks, ", self._gradients.nonfinite),
            ]
        for kind, nonfinite in sources:
            for stage in reversed(range(stages)):
                names = nonfinite(parts[stage]) if stage in parts else []
                if at := guard.first_rank_with(names[-1] if names else None):
                    return kind + at
        return "every entry is finite, but the squares overflow"

    def _log_step(
        self, loss: torch.Tensor, token_share: float, grad_norm: torch.Tensor, lr: float
    ) -> None:
        mesh = self.parallel_dims.get_optional_mesh("loss")
        pipeline = self.parallel_dims.get_optional_mesh("pp")
        since_last = torch.stack(self._losses).mean()
        self._losses.clear()
        if pipeline is not None:
            # Only the last stage has the loss; rank 0 needs it for logging.
            dist.all_reduce(loss, group=pipeline.get_group())
            dist.all_reduce(since_last, group=pipeline.get_group())
        # A rank without valid tokens has no mean loss.
        own = loss / token_share if token_share else torch.full_like(loss, -math.inf)
        counted: Counter[str] = Counter()
        for row in [] if self._ledger is None else self._ledger.rows():
            counted[row["mesh_dim"]] += row["bytes"]
        self.metrics_processor.log(
            self.step,
            dist_utils.dist_sum(loss, mesh),
            dist_utils.dist_max(own, mesh),
            grad_norm.item(),
            extra_metrics={
                "n_tokens_seen": self.ntokens_seen * self._batch_degree,
                "lr": lr,
                history.INTERVAL_LOSS: dist_utils.dist_sum(since_last, mesh),
                "skipped_steps": self.skipped_steps,
                **self._reader.metrics(),
                **{f"comm_bytes/{dim}": size for dim, size in sorted(counted.items())},
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
        if guard.first_rank_with("" if known else None) is None:
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
        history.draw_curve(records, curve, f"{what}, {layout(self.parallel_dims)}")
        summary = history.build_summary(records, self.step, peak.item(), checkpoint)
        write_whole(file, json.dumps(summary | {"curve": str(curve)}, indent=2) + "\n")
        logger.info("Summary written to %s", file)
        for opened in processor.opened:
            opened.publish(summary, curve)


def layout(dims: ParallelDims) -> str:
    """Return the parallel degrees in words, such as ``4 ranks (dp_shard 2, tp 2)``."""
    names = ("dp_replicate", "dp_shard", "tp", "pp")
    degrees = ((name, getattr(dims, name)) for name in names)
    split = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    return "1 rank" if dims.world_size == 1 else f"{dims.world_size} ranks ({split})"
