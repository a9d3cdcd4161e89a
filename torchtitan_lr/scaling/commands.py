# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The commands of ``scripts/scaling.py``: plan, run and fit."""

import json
import sys
from pathlib import Path
from typing import IO

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.folder_lock import lock_file
from torchtitan_lr.scaling.costs import measured_rate
from torchtitan_lr.scaling.experiments import Stopped
from torchtitan_lr.scaling.pages import fill_in
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.report import (
    as_json,
    as_markdown,
    edges_of,
    plan_rows,
    plan_text,
    results,
    write,
)
from torchtitan_lr.scaling.runner import Runner, check_commit, current_commit, slots_of


def open_folder(work: Path) -> None:
    """Create the folder of an experiment.

    Raises:
        ConfigError: It cannot be created.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        want = f"a folder to write to ({error.strerror})"
        raise ConfigError("--out", str(work), want) from error


def show(plan: Plan, jobs: int, in_json: bool) -> int:
    """Print the runs and what they cost; returns the exit status.

    Args:
        plan: The plan.
        jobs: Runs at once; 0 for as many as the machine allows.
        in_json: Print rows instead of a table.
    """
    plan.check()
    device, slots = _slots(plan, jobs)
    rate, source = plan.rate()
    if not rate:
        rate = measured_rate(device) * (plan.experiment.ranks if device != "cpu" else 1)
        source = f"{rate:.3g} FLOP/s of matrix products on this machine, which no run reaches"
    rows = plan_rows(plan, rate)
    if in_json:
        print(json.dumps(rows, indent=1))
    else:
        print(plan_text(plan, rows, len(slots), source))
    return 0


def _slots(plan: Plan, jobs: int) -> tuple[str, list[str]]:
    import torch

    devices = torch.cuda.device_count()
    device = "cuda" if devices else "cpu"
    return device, slots_of(jobs, plan.experiment.most_ranks, device, devices)


def execute(plan: Plan, jobs: int, mix: bool) -> int:
    """Run what is missing; returns the exit status.

    Args:
        plan: The plan.
        jobs: Runs at once; 0 for as many as the machine allows.
        mix: Whether the runs may be of several commits.

    Raises:
        ConfigError: The experiment cannot run here, or another process uses its folder.
    """
    path = plan.work / ".lock"
    try:
        file = path.open("w")
    except OSError as error:
        want = f"a folder to write to ({error.strerror})"
        raise ConfigError("--out", str(plan.work), want) from error
    with file as lock:
        try:
            lock_file(lock, path)
        except BlockingIOError:
            want = "a folder that no other command, nor a run left by one, is using"
            raise ConfigError("--out", str(plan.work), want) from None
        return _execute(plan, jobs, mix, lock)


def _execute(plan: Plan, jobs: int, mix: bool, lock: IO[str]) -> int:
    plan.read()  # once more, with the lock
    plan.check()
    commit = current_commit()
    check_commit(plan, commit, mix)
    runner = Runner(plan, *_slots(plan, jobs), commit, lock)
    runner.stop_on_signals()
    try:
        runner.run()
    except Stopped as signal:
        print(f"stopped by {signal}: run the same command to continue", file=sys.stderr)
        return 130
    edges = edges_of(plan)
    for line in edges:
        print(line, file=sys.stderr)
    main = plan.main_runs()
    done = sum(run.rate is not None and plan.is_done(run) for run in main)
    print(f"{done} of {len(main)} runs have a result, {len(runner.failed)} failed")
    return 1 if runner.failed or edges else 0


def fit(plan: Plan, draws: int, huber: float, whole: bool, in_json: bool) -> int:
    """Fit the laws, print and write them; returns the exit status.

    Args:
        plan: The plan.
        draws: Number of bootstrap fits.
        huber: Difference of log L from which a point counts linearly.
        whole: Fit all points, and not only those that no cheaper one beats.
        in_json: Print JSON instead of the table.
    """
    found = results(plan, draws, huber, whole)
    write(plan, found)
    print(as_json(plan, found) if in_json else as_markdown(plan, found))
    return 1 if found["edges"] else 0


def write_page(plan: Plan, page: str, draws: int, huber: float, whole: bool) -> int:
    """Write an experiment's tables and picture into a page; returns the exit status.

    Args:
        plan: The plan.
        page: Path of the page; empty for ``docs/results/NAME.md``.
        draws: Number of bootstrap fits.
        huber: As in `fit`.
        whole: As in `fit`.
    """
    path = Path(page or f"docs/results/{plan.experiment.name}.md")
    found = results(plan, draws, huber, whole)
    fill_in(plan, found, path)
    print(path)
    return 0
