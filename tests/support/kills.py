# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Kill a run repeatedly, mostly during saves, and compare it with an undisturbed run.

Each attempt starts the run through the launcher and ends with SIGKILL of the launcher, of one rank,
or of all of them. The next attempt resumes. A seed determines the victim and the time,
which is random after the start of a save. After the last kill the run trains to its end.


Three conditions must hold: the other processes end within five seconds of the kill; losses and
gradient norms equal the undisturbed run's to the last digit; ``metrics.jsonl`` has every step once.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lr.checkpoints.folders import all_steps
from torchtitan_lr.training.history import HISTORY_FILE, read_history

ORPHAN_SECONDS = 5.0
"""Seconds within which all processes must end after a kill."""

PATIENCE = 600.0
"""Seconds without progress after which an attempt counts as hung."""

VICTIMS = ("launcher", "rank", "all")

SMALL = [
    *("--training.local_batch_size=2", "--training.seq_len=32", "--metrics.log_freq=1"),
    *("--validation.no_enable", "--checkpoint.enable", "--checkpoint.interval=1"),
    *("--checkpoint.keep_latest_k=3", "--metrics.no_enable_tensorboard"),
]
"""Arguments for steps so short that a run spends most of its time in saves."""

EXACT = ("step", "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr")
"""Keys of a record that depend only on the configuration."""


class Life(Protocol):
    """A started launcher."""

    pid: int

    def finish(self) -> Any:
        """Wait for its end; return an object with its ``status`` and its output ``everything``."""


Start = Callable[[Sequence[str]], Life]
"""Starts the launcher with arguments."""


@dataclass(frozen=True)
class Kill:
    """One kill: the victim, the step being saved, and the seconds until the last process ended."""

    victim: str
    step: int
    seconds: float

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"step {self.step}: {self.victim} killed; all had ended {self.seconds:.1f} s later"


class Broken(Exception):
    """A condition above does not hold."""


def live_and_die(start: Start, arguments: Sequence[str], folder: Path, draw: random.Random) -> Kill:
    """Start or resume the run, and kill a part of it during a save."""
    step = max(all_steps(folder / "checkpoint"), default=0) + draw.randint(1, 2)
    victim, delay = draw.choice(VICTIMS), draw.uniform(0, 0.1)
    life = start(arguments)
    deadline = time.monotonic() + PATIENCE
    while step not in all_steps(folder / "checkpoint"):  # until the save has begun
        if not alive(life.pid) or time.monotonic() > deadline:
            raise Broken(f"no save of step {step}:\n{life.finish().everything}")
        time.sleep(0.002)
    time.sleep(delay)
    family = [life.pid, *child_pids(life.pid)]
    for pid in chosen(victim, family, draw):
        os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    while left := [pid for pid in family if alive(pid)]:
        if time.monotonic() - begin > ORPHAN_SECONDS:
            raise Broken(f"{victim} was killed; after {ORPHAN_SECONDS} s {left} of {family} live")
        time.sleep(0.01)
    life.finish()
    return Kill(victim, step, time.monotonic() - begin)


def chosen(victim: str, family: Sequence[int], draw: random.Random) -> list[int]:
    """Return the processes of a victim; ``family`` is launcher, ranks."""
    launcher, *ranks = family
    if victim == "rank":
        return [draw.choice(ranks)]
    return {"launcher": [launcher], "all": list(family)}[victim]


def child_pids(parent: int) -> list[int]:
    """Return the living children of a process, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name in parentheses may itself hold blanks and parentheses.
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def process_state(pid: int) -> str:
    """Return the letter that ``ps`` shows, such as ``T`` where it is stopped; "" for no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Say whether a process runs; one that has ended and was not waited for does not."""
    return process_state(pid) not in ("", "Z")


def compare(folder: Path, undisturbed: Path, steps: int) -> None:
    """Compare two finished runs."""
    disturbed, expected = (
        [{key: record.get(key) for key in EXACT} for record in records(path)]
        for path in (folder, undisturbed)
    )
    found = [record["step"] for record in disturbed]
    if found != list(range(1, steps + 1)):
        raise Broken(f"{HISTORY_FILE} has steps {found}, expected 1 to {steps} once each")
    for record, other in zip(disturbed, expected, strict=True):
        if record != other:
            raise Broken(f"step {record['step']}: {record}, the undisturbed run has {other}")


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of training steps in file order."""
    return [r for r in read_history(folder / HISTORY_FILE) if "grad_norm" in r]


def kill_and_compare(
    start: Start, arguments: Sequence[str], work: Path, kills: int, seed: int
) -> Iterator[Kill]:
    """Kill a run repeatedly, let it finish, and compare it; yield each kill."""
    steps = 4 * (kills + 1)  # each attempt runs a few steps
    draw = random.Random(seed)
    jobs = {
        name: [*arguments, f"--training.steps={steps}", f"--job.dump_folder={work / name}"]
        for name in ("killed", "alone")
    }
    for _ in range(kills):
        yield live_and_die(start, jobs["killed"], work / "killed", draw)
    for job in jobs.values():
        if (ended := start(job).finish()).status:
            raise Broken(ended.everything)
    compare(work / "killed", work / "alone", steps)
