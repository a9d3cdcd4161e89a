# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Execute the missing runs of a plan, several at once, and record their results and commits."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO, Any

from torchtitan_lr.config.shipped import find_config
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.scaling.experiments import Started, Stopped, start
from torchtitan_lr.scaling.forked_runs import ForkedRun
from torchtitan_lr.scaling.machine import describe
from torchtitan_lr.scaling.plan import DIVERGED, FINISHED, RUN_FILE, Plan, Run
from torchtitan_lr.training.summary import SUMMARY_FILE

_PACKAGE = Path(__file__).resolve().parents[2]
_MACHINE = ("device", "cpu", "cores", "torch", "python")
_POLL_SECONDS = 0.05
_RESULTS = ("val_loss", "train_loss", "tokens_per_s", "peak_memory_gib")


def current_commit(folder: Path = _PACKAGE) -> str:
    """Return the commit of the package, with a digest of its uncommitted changes.

    Args:
        folder: The package.

    Returns:
        12 digits of the commit, ``+`` and 8 digits of the changes if there are any; ``installed``
        with the version without a repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    try:
        # The repository must be the package's own, not one around the environment.
        git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "HEAD").strip()[:12]
        changes = git("diff", "HEAD", "--", ".") + git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        from importlib import metadata

        return f"installed {metadata.version('torchtitan_lr')}"
    digest = hashlib.sha256(changes.encode()).hexdigest()[:8]
    return f"{commit}+{digest}" if changes else commit


def check_commit(plan: Plan, commit: str, mix: bool) -> None:
    """Refuse to add runs of another commit to an experiment.

    Args:
        plan: The plan.
        commit: Of the runs to start.
        mix: Whether commits may differ.

    Raises:
        ConfigError: They differ and may not.
    """
    others = [other for other in plan.commits() if other != commit]
    if others and not mix:
        want = f"{others[0]}, that of the runs in {plan.work}, or --mix_commits"
        raise ConfigError("commit", commit, want)


def slots_of(jobs: int, ranks: int, device: str, devices: int) -> list[str]:
    """Return the devices of each run that may execute at once, as CUDA_VISIBLE_DEVICES.

    Args:
        jobs: Number of runs at once; 0 for as many as the machine has cores or devices for.
        ranks: Ranks of a run.
        device: ``cpu`` or the type of the accelerator.
        devices: Number of accelerators.

    Returns:
        One text per run at once, empty on CPU.

    Raises:
        ConfigError: There are too few accelerators.
    """
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return [""] * (jobs or max(1, cores // ranks))
    most = devices // ranks
    jobs = jobs or most
    if jobs > most or most == 0:
        want = f"at most {most}: {devices} devices, {ranks} ranks per run"
        raise ConfigError("--jobs", jobs, want)
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",") if given else [str(i) for i in range(devices)]
    return [",".join(names[i * ranks : (i + 1) * ranks]) for i in range(jobs)]


class Runner:
    """Executes what is missing.

    Runs on a CPU are forked from one process with all imports done; a small run would spend most of
    its time on them.

    Args:
        plan: The plan.
        device: ``cpu`` or the type of the accelerator.
        slots: Returned by `slots_of`.
        commit: Recorded with each run.
        lock: A locked file in the plan's folder; runs that may outlive this process inherit it.
    """

    def __init__(
        self, plan: Plan, device: str, slots: list[str], commit: str, lock: IO[str]
    ) -> None:
        self.plan, self.commit, self._device, self._lock = plan, commit, device, lock
        self._free = list(enumerate(slots))
        self._active: dict[Run, tuple[Started | ForkedRun, tuple[int, str], float | None]] = {}
        self.failed: dict[str, str] = {}
        found = describe()
        self._machine = {key: found[key] for key in _MACHINE}
        self._stop = ""

    def stop_on_signals(self) -> None:
        """Make SIGTERM and Ctrl-C end `run`, after the start or end of a run that is under way."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stop = signal.Signals(number).name

        for number in (signal.SIGTERM, signal.SIGINT):
            # Keep a signal ignored that ``nohup`` or ``cmd &`` set to be ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, stop)

    def run(self) -> None:
        """Run all that is missing; what a finished search determines is started then.

        Raises:
            Stopped: This process received a stop signal; the active runs have saved.
        """
        try:
            self._start_some()
            while self._active:
                ended = [run for run, (job, *_) in self._active.items() if job.ended()]
                for run in ended:
                    self._finish(run)
                if ended:
                    self._start_some()
                if self._stop:
                    raise Stopped(self._stop)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            for job, *_ in self._active.values():
                job.terminate()
            for run in list(self._active):
                self._finish(run)
            raise

    def _start_some(self) -> None:
        """Start runs while there is room."""
        waiting = [
            run
            for run in self.plan.missing()
            if run not in self._active and run.name not in self.failed
        ]
        for run in waiting[: len(self._free)]:
            if not self._stop:
                self._start(run)

    def _start(self, run: Run) -> None:
        slot = self._free.pop(0)
        print(f"{run.name} ... ({self.plan.steps(run)} steps)", file=sys.stderr, flush=True)
        known = self.plan.records.get(run.name, {}).get("commits", [])
        commits = list(dict.fromkeys([*known, self.commit]))
        self._save(run, "started", commits, {})
        # The time of a run that goes on is that of its last part.
        begin = None if known else time.monotonic()
        self._active[run] = (self._job(run, slot[1]), slot, begin)

    def _job(self, run: Run, devices: str) -> Started | ForkedRun:
        config, folder = find_config(self.plan.experiment.config), self.plan.folder(run)
        arguments, ranks = self.plan.arguments(run), self.plan.experiment.ranks_of(run.family)
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        if self._device == "cpu":
            own = [f"--job.config_file={config}", f"--job.dump_folder={folder}"]
            return ForkedRun([*own, *arguments], folder, ranks, int(threads))
        variables = {"OMP_NUM_THREADS": threads}
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = devices
        return start(config, folder, arguments, ranks, variables, [self._lock.fileno()])

    def _finish(self, run: Run) -> None:
        job, slot, begin = self._active.pop(run)
        self._free.append(slot)
        commits = self.plan.records[run.name]["commits"]
        path = self.plan.folder(run) / SUMMARY_FILE
        try:
            job.finish()
            summary = json.loads(path.read_text()) if path.is_file() else {}
            if summary.get("steps") != self.plan.steps(run):
                raise RunFailedError("stopped before its last step")
        except RunFailedError as error:
            diverged = "is not finite" in str(error) or "are not finite" in str(error)
            if not diverged:
                self.failed[run.name] = str(error)
                print(f"{run.name}: {error}", file=sys.stderr)
            self._save(run, DIVERGED if diverged else f"failed: {error}", commits, {})
            return
        row = {key: summary[key] for key in _RESULTS}
        seconds = None if begin is None else time.monotonic() - begin
        row |= {"flops": self.plan.flops(run), "seconds": seconds}
        if isinstance(job, ForkedRun):
            row["cpu_seconds"] = job.cpu_seconds()
        loss = row["val_loss"]
        if loss is None or not math.isfinite(loss):
            self._save(run, DIVERGED, commits, row | {"val_loss": None})
        else:
            self._save(run, FINISHED, commits, row)

    def _save(self, run: Run, status: str, commits: list[str], row: dict[str, Any]) -> None:
        record = {"run": asdict(run), "status": status, "commits": commits, "row": row}
        record |= {"arguments": self.plan.arguments(run), "machine": self._machine}
        path = self.plan.folder(run) / RUN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(record, indent=1) + "\n")
        scratch.replace(path)
        self.plan.records[run.name] = record
