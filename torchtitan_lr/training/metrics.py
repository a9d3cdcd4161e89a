# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Metrics on the console, in TensorBoard, in wandb and in ``metrics.jsonl``.

Differences from torchtitan's processor: MFU is computed from the model's own FLOPs and left out if
the device's peak is unknown; throughput excludes validation and checkpoints; the TOML configures
wandb; ``metrics.jsonl`` in the dump folder has every printed number in full precision.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
)
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools.logging import logger

from torchtitan_lr.compat.titan_trainer import build_loggers, without_loggers
from torchtitan_lr.models.loss import perplexity
from torchtitan_lr.training.history import HISTORY_FILE, read_history

_WANDB_VARIABLES = {
    "WANDB_PROJECT": "wandb_project",
    "WANDB_RUN_NAME": "wandb_run_name",
    "WANDB_RUN_GROUP": "wandb_group",
}


class HistoryLogger(BaseLogger):
    """Appends each record to a JSON-lines file, so that curves survive an interruption.

    Args:
        path: The file; its folder is created if needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Append one record; NaN and infinity become null, since JSON has neither."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"step": step} | {key: _finite_or_none(v) for key, v in metrics.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the records after ``step``; a run resumed from ``step`` writes them again."""
        if not self.path.is_file():
            return
        kept = [record for record in read_history(self.path) if record["step"] <= step]
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept))
        scratch.replace(self.path)


class LowRankMetricsProcessor(MetricsProcessor):
    """torchtitan's processor with the model's own MFU, training-only throughput and a history file.

    Args:
        job_config: ``[metrics]`` selects the loggers.
        parallel_dims: Parallel degrees.
        tag: A prefix for TensorBoard and wandb keys.
    """

    logger: BaseLogger

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        set_wandb_environment(job_config)
        # `start_after` opens the loggers, once the checkpoint has been loaded without an error.
        with without_loggers():
            super().__init__(job_config, parallel_dims, tag)
        self._tag = tag
        self.history: HistoryLogger | None = None
        if torch.distributed.get_rank() == 0:
            self.history = HistoryLogger(Path(job_config.job.dump_folder) / HISTORY_FILE)
            self.logger = LoggerContainer()
            self.logger.add_logger(self.history)
        self._paused_at: float | None = None
        self._last_logged_step = 0

    def should_log(self, step: int) -> bool:
        """Log the first step, every ``metrics.log_freq`` steps and the last one."""
        return super().should_log(step) or step == self.job_config.training.steps

    def start_after(self, step: int) -> None:
        """Open the loggers for a run that starts after ``step``, the loaded checkpoint's step."""
        self._last_logged_step = step
        container = LoggerContainer()
        container.add_logger(build_loggers(self.job_config, self.parallel_dims, self._tag))
        if self.history is not None:
            container.add_logger(self.history)
        self.logger = container
        if self.history is not None:
            self.history.rewind(step)

    def has_validation(self, step: int) -> bool:
        """Return, on every rank, whether the history holds the validation of a step."""
        known = False
        if self.history is not None:
            records = read_history(self.history.path)
            known = any(r["step"] == step and "validation_metrics/loss" in r for r in records)
        answers = [False] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answers, known)
        return any(answers)

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
            "throughput(tps)": tps,
            "throughput/tokens_per_s": tps * self.parallel_dims.world_size,
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
        color = self.color
        logger.info(
            f"{color.red}step: {step:2}  {color.green}loss: {global_avg_loss:8.5f}  "
            f"{color.orange}grad_norm: {grad_norm:7.4f}  "
            f"{color.turquoise}memory: {memory.max_reserved_gib:5.2f}GiB  "
            f"{color.blue}tps: {round(tps):,}  "
            f"{color.magenta}mfu: {'unknown peak' if math.isnan(mfu) else f'{mfu:.2f}%'}"
            f"{color.reset}"
        )
        self._last_logged_step = step
        self._start_window()

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
        color = self.color
        logger.info(
            f"{color.yellow}validate step: {step:2}  {color.green}loss: {loss:8.5f}  "
            f"{color.blue}perplexity: {perplexity(loss):,.3f}{color.reset}"
        )

    def _start_window(self) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: BaseModelArgs | None = None,
    tag: str | None = None,
) -> LowRankMetricsProcessor:
    """Build the processor; torchtitan's TrainSpec prescribes these arguments."""
    del model_args
    return LowRankMetricsProcessor(job_config, parallel_dims, tag)


def set_wandb_environment(job_config: JobConfig) -> None:
    """Set wandb's environment variables from ``[metrics] wandb_*``; upstream reads only these.

    Variables that are already set take precedence. Mode ``auto`` is offline if no credentials are
    found, so that a run never waits for a log-in.
    """
    metrics = job_config.metrics
    if not metrics.enable_wandb:
        return
    for variable, field in _WANDB_VARIABLES.items():
        if value := getattr(metrics, field):
            os.environ.setdefault(variable, value)
    if metrics.wandb_tags:
        # torchtitan passes WANDB_RUN_TAGS to wandb as one string, which wandb splits into letters.
        os.environ.setdefault("WANDB_TAGS", ",".join(metrics.wandb_tags))
    mode = metrics.wandb_mode
    if mode == "auto":
        mode = "online" if _has_wandb_credentials() else "offline"
    os.environ.setdefault("WANDB_MODE", mode)


def _has_wandb_credentials() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text()


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
