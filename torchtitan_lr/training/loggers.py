# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard and Weights & Biases.

A resumed run continues its TensorBoard folder and its wandb run. Both get the resolved
configuration at the start, and the summary and the curve at the end.
"""

import json
import math
import os
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_lr.console.log import console
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig
from torchtitan_lr.titan.components import BaseLogger, TensorBoardLogger, WandBLogger
from torchtitan_lr.training.history import read_history

WANDB_ID_FILE = "wandb_run_id"
"""In the dump folder: the id of the run's wandb run."""

_WANDB_VARIABLES = {
    "WANDB_PROJECT": "wandb_project",
    "WANDB_RUN_NAME": "wandb_run_name",
    "WANDB_RUN_GROUP": "wandb_group",
}


class HistoryLogger(BaseLogger):
    """Appends each record to a JSON-lines file, so that curves survive an interruption."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Append one record; NaN and infinity become null, since JSON has neither."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"step": step}
        for key, value in metrics.items():
            infinite = isinstance(value, float) and not math.isfinite(value)
            record[key] = None if infinite else value
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


class RunTensorBoard(TensorBoardLogger):
    """torchtitan's TensorBoard, which a resumed run continues.

    Args:
        folder: The folder of all starts of this run, e.g. ``tb``; each new run gets a folder in it.
        after: The step that was loaded; a run that starts after step 0 continues the newest
            folder, and TensorBoard drops the later steps there.
        config: The resolved configuration.
    """

    def __init__(self, folder: Path, after: int, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        earlier = sorted(path for path in folder.glob("*") if path.is_dir())
        goes_on = after > 0 and bool(earlier)
        place = earlier[-1] if goes_on else folder / f"{datetime.now():%Y%m%d-%H%M%S}"
        # Not upstream's constructor: its writer takes no step to purge from.
        self.tag = None
        purge = after + 1 if goes_on else None
        self.writer = SummaryWriter(str(place), max_queue=1000, purge_step=purge)
        self._add_text("config", config, after)

    def publish(self, summary: dict[str, Any], curve: Path) -> None:
        """Add the summary of a finished run as text, and its curve as an image."""
        from matplotlib.image import imread

        step = summary["steps"]
        self._add_text("summary", summary, step)
        self.writer.add_image("curve", imread(curve)[..., :3], step, dataformats="HWC")

    def end(self, status: int) -> None:
        """Write what is queued, whatever the run's exit status."""
        self.close()

    def _add_text(self, name: str, values: dict[str, Any], step: int) -> None:
        """Add values as a block of code in Markdown."""
        lines = json.dumps(values, indent=1).splitlines()
        self.writer.add_text(name, "\n".join(f"    {line}" for line in lines), step)


class RunWandb(WandBLogger):
    """torchtitan's wandb, online or into files (``metrics.wandb_mode``), which a run continues.

    Args:
        dump_folder: ``job.dump_folder``; keeps the run's id.
        after: The step that was loaded; a run that starts after step 0 continues its wandb run.
        config: The resolved configuration.
    """

    def __init__(self, dump_folder: Path, after: int, config: dict[str, Any]) -> None:
        import wandb  # imported late: few runs use it

        # Not upstream's constructor: it cannot resume a run.
        self.wandb, self.tag = wandb, None
        kept = dump_folder / WANDB_ID_FILE
        stored = kept.read_text().strip() if after > 0 and kept.is_file() else ""
        run_id = os.environ.get("WANDB_RUN_ID") or stored or secrets.token_hex(4)
        self._run = wandb.init(
            entity=os.environ.get("WANDB_TEAM"),
            project=os.environ.get("WANDB_PROJECT"),
            name=os.environ.get("WANDB_RUN_NAME"),
            group=os.environ.get("WANDB_RUN_GROUP"),
            notes=os.environ.get("WANDB_RUN_NOTES"),
            job_type=os.environ.get("WANDB_RUN_JOB_TYPE"),
            id=run_id,
            # Offline, wandb ignores `resume`; the equal id joins the parts when they are synced.
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            dir=str(dump_folder),
        )
        # A resumed run may have another configuration, such as more steps.
        self._run.config.update(config, allow_val_change=True)
        kept.write_text(run_id + "\n")
        if self._run.offline:
            where = f"offline; `wandb sync {Path(self._run.dir).parent}` uploads it"
        else:
            where = str(self._run.url)
        console.info("wandb run %s: %s", run_id, where)

    def publish(self, summary: dict[str, Any], curve: Path) -> None:
        """Upload the summary's values and file, and the curve."""
        self._run.summary.update(summary)
        self._run.log({"curve": self.wandb.Image(str(curve))})
        for path in (curve, curve.with_name("summary.json")):
            self._run.save(str(path), base_path=str(path.parent), policy="now")

    def end(self, status: int) -> None:
        """End the wandb run, as failed if the run's exit status is not 0."""
        self._run.finish(exit_code=status)


def open_loggers(
    job_config: JobConfig, after: int, config: dict[str, Any], rank: int
) -> list[RunTensorBoard | RunWandb]:
    """Open TensorBoard and wandb according to ``[metrics]``.

    Args:
        job_config: The run's configuration.
        after: The step that was loaded, 0 for a new run.
        config: The resolved configuration.
        rank: This rank. wandb is written by rank 0, TensorBoard by the others too if
            ``metrics.save_for_all_ranks``.
    """
    metrics, dump_folder = job_config.metrics, Path(job_config.job.dump_folder)
    opened: list[RunTensorBoard | RunWandb] = []
    if metrics.enable_wandb and rank == 0:
        try:
            opened.append(RunWandb(dump_folder, after, config))
        except Exception as error:  # of the network, the account or the disk
            logger.warning("wandb cannot be used, training goes on without it: %s", error)
    if metrics.enable_tensorboard and (rank == 0 or metrics.save_for_all_ranks):
        folder = dump_folder / metrics.save_tb_folder
        if metrics.save_for_all_ranks:
            folder /= f"rank_{rank}"
        opened.append(RunTensorBoard(folder, after, config))
    return opened


def set_wandb_environment(job_config: JobConfig) -> None:
    """Set wandb's environment variables from ``[metrics] wandb_*``.

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
        os.environ.setdefault("WANDB_TAGS", ",".join(metrics.wandb_tags))
    mode = metrics.wandb_mode
    if mode == "auto":
        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        known = netrc.is_file() and "wandb" in netrc.read_text()
        mode = "online" if known or os.environ.get("WANDB_API_KEY") else "offline"
    os.environ.setdefault("WANDB_MODE", mode)
    # Its own lines and warnings; the run's address is on the console (`WandbLogger`).
    os.environ.setdefault("WANDB_SILENT", "true")
