# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The runner of a sweep's points: all are checked first, each runs once, several at a time."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError, escaped
from torchtitan_lr.experiments.points import RESULTS, Point, as_markdown, read_results, table_of
from torchtitan_lr.experiments.start import place_run
from torchtitan_lr.launch import run_state
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.training.history import SUMMARY_FILE

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Started:
    """The run of a point, in a process."""

    point: Point
    number: int  # among all points, those that are done first
    gpus: list[str]  # its own ones
    process: subprocess.Popen[bytes]
    stderr: IO[str]


class Sweep:
    """Points whose results are read from a folder, and those without one run there."""

    def __init__(self, work: Path, points: Sequence[Point], jobs: int = 1) -> None:
        self.work, self.points, self.jobs = work, points, jobs
        self._gpus: dict[str, int] = {}  # how many each point needs, if points share the machine
        read_results(work, points)

    def check(self, skip_refused: bool = False) -> None:
        """Check the configuration of every point that is not done, before the first run."""
        refused: list[ConfigError] = []
        for point in self.points:
            if point.is_done:
                continue
            folder = f"--job.dump_folder={self.work / point.name}"
            arguments = [f"--job.config_file={point.config}", *point.arguments, folder]
            try:
                placed = place_run(arguments, point.ranks)
            except ConfigError as error:
                if not skip_refused:
                    key = f"{point.name}: {error.key}"
                    raise ConfigError(key, error.got, error.want) from error
                point.row = {"status": run_state.REFUSED, "why": str(error)}
                refused.append(error)
                continue
            args = llama_args(placed.config)  # None for another package's model
            point.row["parameters"] = args and sum(map(math.prod, model_shapes(args).values()))
            if self.jobs > 1 and placed.device not in ("cpu", "cuda"):
                raise ConfigError("--jobs", self.jobs, f"1 on a machine with {placed.device}")
            if self.jobs > 1 and placed.device == "cuda":
                self._gpus[point.name] = placed.environment.ranks
        if refused and len(refused) == len(self.points):
            raise refused[0]

    def run(self, without: Collection[str] = ()) -> int:
        """Run the points that are not done; return 0 if all are, 1 if some failed.

        At a signal, which is an exception here, the active runs save and end.
        """
        self._write()
        waiting = [p for p in self.points if not p.is_done and p.name not in without]
        number = len(self.points) - len(waiting)
        active: list[_Started] = []
        free = _visible_gpus() if self._gpus else []
        try:
            while active or waiting:
                while waiting and len(active) < self.jobs:
                    needed = self._gpus.get(waiting[0].name, 0)
                    if needed > len(free):
                        break
                    point, gpus, free = waiting.pop(0), free[:needed], free[needed:]
                    number += 1
                    active.append(self._start(point, number, gpus))
                time.sleep(_POLL_SECONDS)
                for run in [run for run in active if run.process.poll() is not None]:
                    active.remove(run)
                    free += run.gpus
                    self._finish(run)
        except KeyboardInterrupt:
            print("stopped: run the same command to continue", file=sys.stderr)
            raise
        finally:
            for run in active:
                run.process.terminate()
            for run in active:
                self._finish(run)
        return int(any(not point.is_done for point in self.points))

    def _start(self, point: Point, number: int, gpus: list[str]) -> _Started:
        """Start a point's training through the launcher; a run with a checkpoint resumes."""
        self._say(number, point, "starts")
        point.save(self.work, "cut off")  # the status if this process dies before the run's end
        folder = self.work / point.name
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "torchtitan_lr", "train", f"--job.config_file={point.config}"),
            *(f"--job.dump_folder={folder}", *point.arguments),
        ]
        environment = os.environ | {"CONFIG_FILE": point.config}
        if point.ranks is not None:
            environment["NGPU"] = str(point.ranks)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if self.jobs > 1:
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when `_Started` is freed)
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # only this process receives Ctrl-C, and passes it on once
        )
        return _Started(point, number, gpus, process, stderr)

    def _finish(self, run: _Started) -> None:
        """Wait for the end of a run, and write its result; `runs` shows those of running ones."""
        point, path = run.point, self.work / run.point.name / SUMMARY_FILE
        ended = run.process.wait()
        if ended != run_state.EXIT_STATUS[run_state.FINISHED]:
            run.stderr.seek(0)
            # What refuses a run that the check has accepted may pass: it is repeated.
            diverged = ended == run_state.EXIT_STATUS[run_state.DIVERGED]
            status = run_state.DIVERGED if diverged else run_state.FAILED
            point.save(self.work, status, last_error(run.stderr.read(), ended))
        elif not path.is_file():
            point.save(self.work, run_state.STOPPED, "before its last step")
        else:
            summary = read_json(path)
            point.row |= {key: summary[key] for key in ("steps", *RESULTS)}
            losses = [summary["val_loss"], summary["train_loss"]]
            finite = all(loss is None or math.isfinite(loss) for loss in losses)
            point.save(self.work, run_state.FINISHED if finite else run_state.DIVERGED)
        told = point.outcome
        for what, key in {"validation loss": "val_loss", "training loss": "train_loss"}.items():
            if point.row.get(key) is not None:
                told += f", {what} {point.row[key]:.4f}"
        self._say(run.number, point, told)
        self._write()

    def _say(self, number: int, point: Point, what: str) -> None:
        place = f"{number}/{len(self.points)}"
        print(escaped(f"{place} {point.name}: {what}"), file=sys.stderr, flush=True)

    def _write(self) -> None:
        """Write the table: sweep.json and sweep.md."""
        rows = table_of(self.points)
        write_whole(self.work / "sweep.json", json.dumps(rows, indent=1) + "\n")
        write_whole(self.work / "sweep.md", as_markdown(rows) + "\n")


def _visible_gpus() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]


def last_error(output: str, status: int) -> str:
    """Return a program's last line that begins with ``error: ``, else its last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"it ended with status {status}"])[-1]
