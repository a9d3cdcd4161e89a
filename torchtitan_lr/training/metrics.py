# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Metrics on the console, in TensorBoard, in wandb and in ``metrics.jsonl``.

Differences from torchtitan's processor: MFU is computed from the model's own FLOPs and left out if
the device's peak is unknown; throughput excludes validation and checkpoints, and tokens/s count all
ranks; the TOML configures wandb; ``metrics.jsonl`` in the dump folder has every printed number in
full precision.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch

from torchtitan_lr.console.lines import Pace, step_line, validation_line
from torchtitan_lr.console.log import console
from torchtitan_lr.models.loss import perplexity
from torchtitan_lr.titan.base import BaseModelArgs, JobConfig, ParallelDims
from torchtitan_lr.titan.components import LoggerContainer, MetricsProcessor, without_loggers
from torchtitan_lr.training.history import HISTORY_FILE
from torchtitan_lr.training.loggers import (
    HistoryLogger,
    RunTensorBoard,
    RunWandb,
    open_loggers,
    set_wandb_environment,
)
from torchtitan_lr.training.resolved import resolved_config


class LowRankMetricsProcessor(MetricsProcessor):
    """torchtitan's processor with the model's own MFU, training-only throughput and a history file.

    Args:
        job_config: ``[metrics]`` selects the loggers.
        parallel_dims: Parallel degrees.
        model_args: The model's arguments, for the record of the configuration.

    Attributes:
        exit_status: The run's; wandb shows a run with another status than 0 as failed.
        opened: TensorBoard and wandb, once the run has started; they take the summary.
        history: ``metrics.jsonl``, on rank 0.
    """

    logger: LoggerContainer
    time_last_log: float
    ntokens_since_last_log: int

    def __init__(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        model_args: BaseModelArgs | None = None,
    ) -> None:
        set_wandb_environment(job_config)
        # `start_after` opens the loggers, once the checkpoint has been loaded without an error.
        with without_loggers():
            super().__init__(job_config, parallel_dims)
        self._model_args = model_args
        self.exit_status = 0
        self._pace = Pace(job_config.training.steps)
        self.opened: list[RunTensorBoard | RunWandb] = []
        self.history: HistoryLogger | None = None
        self.logger = LoggerContainer()
        if torch.distributed.get_rank() == 0:
            self.history = HistoryLogger(Path(job_config.job.dump_folder) / HISTORY_FILE)
            self.logger.add_logger(self.history)
        self._paused_at: float | None = None
        self._last_logged_step = 0

    def should_log(self, step: int) -> bool:
        """Log the first step, every ``metrics.log_freq`` steps and the last one."""
        return super().should_log(step) or step == self.job_config.training.steps

    def start_after(self, step: int) -> None:
        """Open the loggers for a run that starts after ``step``, the loaded checkpoint's step."""
        self._last_logged_step = step
        config = resolved_config(self.job_config, self.parallel_dims, self._model_args)
        self.opened = open_loggers(self.job_config, step, config, torch.distributed.get_rank())
        for opened in self.opened:
            self.logger.add_logger(opened)
        if self.history is not None:
            self.history.rewind(step)

    def close(self) -> None:
        """Close the loggers; those that know failed runs get ``exit_status``."""
        for opened in self.opened:
            opened.end(self.exit_status)
        self.opened = []

    def pause(self) -> None:
        """Pause the throughput clock during validation and saves."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Resume the throughput clock."""
        if self._paused_at is not None:
            self.time_last_log += time.perf_counter() - self._paused_at
            self._paused_at = None

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step.

        Args:
            step: The step just finished, from 1.
            global_avg_loss: Mean loss over all valid tokens of all ranks, nats per token.
            global_max_loss: The largest mean loss of a rank, nats per token.
            grad_norm: Norm of the full gradient before clipping.
            extra_metrics: Further scalars.
        """
        seconds = time.perf_counter() - self.time_last_log
        steps = step - self._last_logged_step
        # Tokens per second per device: the ranks of a tensor-parallel group read the same tokens.
        tps = self.ntokens_since_last_log / (seconds * self.parallel_dims.non_data_parallel_size)
        mfu = 100 * self.num_flops_per_token * tps / self.gpu_peak_flops
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput/tokens_per_s": tps * self.parallel_dims.world_size,
            "throughput/tokens_per_s_per_device": tps,
            "tflops": self.num_flops_per_token * tps / 1e12,
            "time_metrics/end_to_end(s)": seconds / max(steps, 1),
            "time_metrics/data_loading(%)": 100 * sum(self.data_loading_times) / seconds,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
            **({} if math.isnan(mfu) else {"mfu(%)": mfu}),
            **(extra_metrics or {}),
        }
        self.logger.log(metrics, step)
        console.info(
            step_line(
                step,
                self.job_config.training.steps,
                self._pace.left(step, time.perf_counter()),
                loss=global_avg_loss,
                grad_norm=grad_norm,
                lr=metrics.get("lr"),
                tokens=metrics.get("n_tokens_seen"),
                tokens_per_s=metrics["throughput/tokens_per_s"],
                mfu=metrics.get("mfu(%)"),
                memory_gib=memory.max_reserved_gib,
            )
        )
        self._last_logged_step = step
        # The next window starts.
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log one validation.

        Args:
            loss: Token-weighted mean, nats per token.
            step: The training step before it.
            extra_metrics: Further scalars.
        """
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {
            "validation_metrics/loss": loss,
            "validation_metrics/memory/max_reserved(GiB)": memory.max_reserved_gib,
            **(extra_metrics or {}),
        }
        self.logger.log(metrics, step)
        seconds = metrics.get("validation_metrics/seconds")
        console.info(validation_line(step, loss, perplexity(loss), seconds))
