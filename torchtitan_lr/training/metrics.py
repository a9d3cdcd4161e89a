# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run's numbers: their computation, ``metrics.jsonl``, the console, TensorBoard and wandb.

Unlike torchtitan's, MFU is by the model's own FLOPs and left out where the peak is unknown;
throughput excludes validation and checkpoints; the TOML configures wandb; a resumed run continues
its TensorBoard folder and its wandb run.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partialmethod
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.checkpoints.record import describe
from torchtitan_lr.console.log import Pace, console, duration
from torchtitan_lr.errors import escaped
from torchtitan_lr.optim.outer import OuterSteps
from torchtitan_lr.titan import components, logger
from torchtitan_lr.titan.base import BaseModelArgs, JobConfig, ParallelDims, drop_marker
from torchtitan_lr.titan.device import device_type
from torchtitan_lr.training import figures, history
from torchtitan_lr.training.watch import Watch

WANDB_ID_FILE = "wandb_run_id"
"""In the dump folder: the id of the run's wandb run, and in a second line the file's path."""

_WHOSE = " (replicas' own)", " (common)"  # the weights of a loss, of replicas that train apart

_LONGEST_UPLOAD = 60  # seconds at the end of a run


class RunTensorBoard(components.TensorBoardLogger):
    """torchtitan's TensorBoard, with the run's record as text.

    A run ``after`` step 0 continues the newest folder, where later steps are dropped.
    """

    known_as = "TensorBoard"

    def __init__(self, folder: Path, after: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        earlier = sorted(path for path in folder.glob("*") if path.is_dir())
        goes_on = after > 0 and bool(earlier)
        place = earlier[-1] if goes_on else folder / f"{datetime.now():%Y%m%d-%H%M%S}"
        # Not upstream's constructor: its writer takes no step to purge from.
        self.tag = None
        purge = after + 1 if goes_on else None
        self.writer = SummaryWriter(str(place), max_queue=1000, purge_step=purge)
        # Indented: TensorBoard shows Markdown, and this is code.
        text = indent(json.dumps(config, indent=1, default=str), " " * 4)
        self.writer.add_text("config", text, after)

    def close(self, exit_status: int = 0) -> None:
        """Write what is left."""
        super().close()


class RunWandb(components.WandBLogger):
    """torchtitan's wandb, online or into files, by ``[metrics] wandb_*`` or wandb's variables.

    Mode ``auto`` is offline without credentials. A run ``after`` step 0 continues its wandb run,
    whose id is in the dump folder, unless it ``repeats`` steps with other losses, of which wandb
    keeps the first, or is in a copy of the folder.
    """

    known_as = "wandb"

    def __init__(
        self,
        dump_folder: Path,
        after: int,
        config: Mapping[str, Any],
        metrics: Any,  # the section
        repeats: bool = False,
    ) -> None:
        given = os.environ.get
        # Its own lines and warnings; the run's address is on the console.
        os.environ.setdefault("WANDB_SILENT", "true")
        # A server that does not answer would hold a finished run; `wandb sync` uploads the rest.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{_LONGEST_UPLOAD}")
        import wandb  # imported late: few runs use it

        # Not upstream's constructor: it cannot resume a run.
        self.wandb, self.tag = wandb, None
        mode: Any = given("WANDB_MODE") or metrics.wandb_mode
        if mode == "auto":
            netrc = Path(given("NETRC", "~/.netrc")).expanduser()
            known = netrc.is_file() and b"wandb" in netrc.read_bytes()
            mode = "online" if known or given("WANDB_API_KEY") else "offline"
        kept = dump_folder / WANDB_ID_FILE
        lines = kept.read_text(errors="ignore") if after > 0 and kept.is_file() else ""
        earlier, _, place = (line.strip() for line in lines.partition("\n"))
        here = os.path.realpath(kept)
        # A folder that was moved is none any more in its old place.
        copied = place not in ("", here) and os.path.isfile(place)
        origin = f"from {earlier} at step {after}" if earlier and (repeats or copied) else ""
        run_id = given("WANDB_RUN_ID") or (not origin and earlier) or secrets.token_hex(4)
        self._run = wandb.init(
            entity=given("WANDB_TEAM"),
            project=given("WANDB_PROJECT") or metrics.wandb_project,
            name=given("WANDB_RUN_NAME") or metrics.wandb_run_name or None,
            group=given("WANDB_RUN_GROUP") or metrics.wandb_group or None,
            tags=tags.split(",") if (tags := given("WANDB_TAGS")) else metrics.wandb_tags,
            notes=origin or None,
            id=run_id,
            mode=mode,
            # Offline too: `wandb sync` then asks the server where the run's earlier parts end, else
            # it would send the lines of a later part as the first ones.
            resume="allow",
            dir=str(dump_folder),
        )
        # A resumed run may have another configuration, such as more steps.
        self._run.config.update(config, allow_val_change=True)
        kept.write_text(f"{run_id}\n{here}\n")
        where = self._run.url
        if self._run.offline:
            where = f"offline; `wandb sync {Path(self._run.dir).parent}` uploads it"
        if run_id == earlier and origin:  # WANDB_RUN_ID says so
            logger.warning("wandb keeps the losses that run %s has of later steps", run_id)
        console.info("wandb run %s%s: %s", run_id, origin and f", {origin}", where)

    def alert(self, title: str, line: str) -> None:
        """Let wandb tell the user, by mail or Slack as its settings say."""
        self._run.alert(title=title, text=line, level="WARN")

    def publish(self, summary: dict[str, Any]) -> None:
        """Give wandb the summary of a finished run."""
        self._run.summary.update(summary)

    def close(self, exit_status: int = 0) -> None:
        """End the wandb run, as failed if the exit status is not 0."""
        self._run.finish(exit_code=exit_status)


class Loggers(components.BaseLogger):
    """TensorBoard and wandb; one that fails is dropped with a warning, and the run goes on."""

    def __init__(self) -> None:
        self.opened: list[RunTensorBoard | RunWandb] = []
        self._wandb_failed = False

    def open(self, kind: type[RunTensorBoard | RunWandb], *arguments: Any) -> None:
        """Open a logger and add it."""
        try:
            self.opened.append(kind(*arguments))
        except Exception as error:
            self._tell(kind, error)

    def _each(self, method: str, *arguments: Any) -> None:
        for opened in [each for each in self.opened if hasattr(each, method)]:
            try:
                getattr(opened, method)(*arguments)
            except Exception as error:
                self.opened.remove(opened)
                self._tell(type(opened), error)

    log: Any = partialmethod(_each, "log")
    alert = partialmethod(_each, "alert")
    publish = partialmethod(_each, "publish")

    def close(self, exit_status: int = 0) -> None:
        """End each, with the run's exit status."""
        self._each("close", exit_status)
        self.opened = []
        if self._wandb_failed:  # it would do so at the interpreter's exit, with a traceback
            with suppress(Exception):
                import wandb

                wandb.teardown()

    def _tell(self, kind: type[RunTensorBoard | RunWandb], error: Exception) -> None:
        what = escaped(f"{type(error).__name__}: {error}")
        logger.warning("%s cannot be used, training goes on without it: %s", kind.known_as, what)
        self._wandb_failed |= kind is RunWandb


class LowRankMetricsProcessor(components.MetricsProcessor):
    """Add the model's own MFU, training-only throughput and a history file to torchtitan's."""

    logger: Loggers  # TensorBoard and wandb, once the run has started
    ntokens_since_last_log: int

    def __init__(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        model_args: BaseModelArgs | None = None,
    ) -> None:
        # `start_after` opens the loggers, once the checkpoint has been loaded without an error.
        with components.without_loggers():
            super().__init__(job_config, parallel_dims)
        self._model_args = model_args
        self.exit_status = 0
        self._pace = Pace(job_config.training.steps)
        self.history: Path | None = None  # the file, on rank 0
        self.logger = Loggers()
        if dist.get_rank() == 0:
            self.history = Path(job_config.job.dump_folder) / history.HISTORY_FILE
        self.seconds = 0.0  # of training since the last logged step: no validation, no saving
        self._last_logged_step = 0
        self.outer: OuterSteps | None = None  # of replicas that train apart
        self.watch: Watch | None = None

    def should_log(self, step: int) -> bool:
        """Log the first step, every ``metrics.log_freq`` steps and the last one."""
        return super().should_log(step) or step == self.job_config.training.steps

    def start_after(self, step: int, record: Mapping[str, Any], differs: bool = False) -> None:
        """Open the loggers for a run that starts after ``step``, the loaded checkpoint's step.

        ``record`` is rank 0's `checkpoints.run_record`; ``differs`` says whether losses do.
        """
        self._last_logged_step = step
        config = dict(record)
        if self._model_args is not None:
            config["model_args"] = drop_marker(asdict(self._model_args))
        metrics, dump_folder = self.job_config.metrics, Path(self.job_config.job.dump_folder)
        rank = dist.get_rank()
        records = [] if self.history is None else history.read_history(self.history)
        # Later records are dropped: a run resumed from ``step`` writes them again.
        kept = [each for each in records if each["step"] <= step]
        repeats = differs and len(kept) < len(records)
        if metrics.enable_wandb and rank == 0:
            self.logger.open(RunWandb, dump_folder, step, config, metrics, repeats)
        if metrics.enable_tensorboard and (rank == 0 or metrics.save_for_all_ranks):
            folder = dump_folder / metrics.save_tb_folder
            if metrics.save_for_all_ranks:
                folder /= f"rank_{rank}"
            self.logger.open(RunTensorBoard, folder, step, config)
        # A file that cannot be read has no records here, and is left as it is.
        if self.history is not None and records:
            write_whole(self.history, "".join(json.dumps(each) + "\n" for each in kept))

    def close(self) -> None:
        """Close the loggers; loggers that record failed runs get ``exit_status``."""
        self.logger.close(self.exit_status)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one training step, from 1.

        The losses are nats per token: the mean over all valid tokens of all ranks, and the largest
        mean of a rank. The norm is the full gradient's or the largest replica's, before clipping.
        """
        # Tokens per second per device: the ranks of a tensor-parallel group read the same tokens.
        copies = self.parallel_dims.non_data_parallel_size
        tps = self.ntokens_since_last_log / (self.seconds * copies)
        mfu = 100 * self.num_flops_per_token * tps / self.gpu_peak_flops
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {
            history.TRAIN_LOSS: global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            history.TOKENS_PER_S: tps * self.parallel_dims.world_size,
            f"{history.TOKENS_PER_S}_per_device": tps,
            "tflops": self.num_flops_per_token * tps / 1e12,
            # The mean per step since the logged one before.
            "time_metrics/end_to_end(s)": self.seconds / max(step - self._last_logged_step, 1),
            "time_metrics/data_loading(%)": 100 * sum(self.data_loading_times) / self.seconds,
            "memory/max_active(GiB)": memory.max_active_gib,
            "memory/max_reserved(GiB)": memory.max_reserved_gib,
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
            **({} if math.isnan(mfu) else {history.MFU: mfu}),
            **(extra_metrics or {}),
        }
        if self.outer is not None:
            metrics[history.TRAIN_COMMON] = int(self.outer.began_together)
        self._write(metrics, step)
        console.info(self._line(step, metrics))
        for title, line in self.watch.look(metrics) if self.watch and self.history else ():
            logger.warning("step %d: %s", step, line)
            self.logger.alert(title, f"step {step}: {line}")
        self._last_logged_step = step
        # The next window starts.
        self.ntokens_since_last_log, self.seconds = 0, 0.0
        self.data_loading_times.clear()

    def _line(self, step: int, metrics: dict[str, Any]) -> str:
        """Return the console's line of a logged step: with rank and time at most 100 characters."""
        steps, left = self.job_config.training.steps, self._pace.left(step, time.perf_counter())
        loss, whose = history.train_loss(metrics) or metrics[history.TRAIN_LOSS], ""
        if self.outer is not None:
            # The loss is the mean of all steps since the last line, or of the last step alone.
            alone = step == self._last_logged_step + 1 or not history.has_mean(metrics)
            all_common = self.outer.section.every == 1 or alone
            whose = _WHOSE[all_common and self.outer.began_together]
        parts = [
            f"step {step:>{len(str(steps))}}/{steps}",
            f"{'-:--:--' if left is None else duration(left)} left",
            f"loss {loss:.5f}{whose}",
            f"norm {metrics['grad_norm']:.4f}",
            f"{metrics[history.TOKENS_PER_S]:,.0f} tokens/s",
        ]
        if history.MFU in metrics:
            parts.append(f"MFU {metrics[history.MFU]:.2f}%")
        return "  ".join(parts)

    def _write(self, metrics: dict[str, Any], step: int) -> None:
        if self.history is not None:
            history.append_record(self.history, metrics, step)
        self.logger.log(metrics, step)

    def log_validations(self, step: int, sets: Mapping[str, Mapping[str, float]]) -> None:
        """Log the numbers of validation sets by name after ``step``, all in one record."""
        metrics: dict[str, Any] = {}
        for name, numbers in sets.items():
            prefix = history.VALIDATION + (f"{name}/" if name else "")
            metrics |= {f"{prefix}{key}": value for key, value in numbers.items()}
        whose = ""
        if self.outer is not None:
            metrics[history.VALIDATION_COMMON] = int(self.outer.together)
            whose = _WHOSE[self.outer.together]
        self._write(metrics, step)
        for name, numbers in sets.items():
            values = f"loss {numbers['loss']:.5f}{whose}  perplexity {numbers['perplexity']:,.2f}"
            values += f"  in {numbers['seconds']:.1f} s"
            console.info(f"validation{name and f' of {name}'} after step {step}  {values}")

    def write_summary(self, step: int, checkpoint: str | None) -> None:
        """Write the summary and the curve of a finished run on rank 0; call it on every rank."""
        peak_gib = self.device_memory_monitor.get_peak_stats().max_reserved_gib
        peak = torch.tensor(peak_gib, dtype=torch.float64, device=device_type())
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if self.history is None:
            return
        config, dims = self.job_config, self.parallel_dims
        file = Path(config.job.dump_folder) / history.SUMMARY_FILE
        records = history.read_history(self.history)
        curve = file.with_name("curve.png")
        what = config.job.description or f"{config.model.name} {config.model.flavor}"
        figures.draw_curve(records, curve, f"{what}, {described_layout(dims)}")
        summary = history.build_summary(records, step, peak.item(), checkpoint)
        summary["curve"] = str(curve)
        try:
            # Imported at the end of a run, on one rank.
            from torchtitan_lr.costs import step_traffic

            summary |= step_traffic.sent_per_step(config, dims.world_size)
        except Exception as error:  # the steps are trained and saved
            logger.warning("The summary lacks what a formula fails to give: %s", describe(error))
        write_whole(file, json.dumps(summary, indent=2) + "\n")
        logger.info("Summary written to %s", file)
        self.logger.publish(summary)


def described_layout(dims: ParallelDims) -> str:
    """Return the parallel degrees in words, such as ``4 ranks (dp_shard 2, tp 2)``."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    degrees = ((name, getattr(dims, name)) for name in names)
    split = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    return "1 rank" if dims.world_size == 1 else f"{dims.world_size} ranks ({split})"
