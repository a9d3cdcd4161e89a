# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Run the parts of the acceptance on a GPU, each in processes of its own with a time limit.

A part is a list of jobs; a job is one command. Its result is ``passed``, ``failed`` or ``skipped``,
with a reason in one line for the last two. A failure ends no other job.
"""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.commands.parser import last_error
from torchtitan_lr.launch.processes import end_with

SHORTEST = 5.0
"""Seconds: a job is not started if less time is left for it."""

_VARIABLES = ("NGPU", "NNODES", "CONFIG_FILE", "LOG_RANK", "COMM_MODE", "TRAIN_FILE")


class SkippedError(Exception):
    """Raised by `Job.read` if the command found that it cannot run here; the message says why."""


@dataclass(frozen=True)
class Job:
    """One command of a part.

    Args:
        name: Of its row in the report.
        command: What to run, in the repository's root.
        read: Called with the standard output; returns the measured values, and as ``wrong`` what
            a status other than 0 means. It raises `SkippedError` if nothing was measured,
            `OSError`, `ValueError` or `KeyError` for an invalid output.
        limit: Seconds after which the command is killed.
        variables: Added to the environment.
        why_not: Why the command cannot run; empty if it can.
    """

    name: str
    command: list[str]
    read: Callable[[str], dict[str, Any]]
    limit: float
    variables: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""

    @property
    def shown(self) -> str:
        """The command as typed in a shell, with ``python`` for this interpreter."""
        words = [*(f"{key}={value}" for key, value in self.variables.items()), *self.command]
        return shlex.join(words).replace(sys.executable, "python")


@dataclass(frozen=True)
class Part:
    """A part of the acceptance.

    Args:
        name: As given to ``--only``.
        title: What it shows.
        jobs: Its commands, run in order.
        columns: Values of the jobs that the report shows, and their headings with units; empty for
            a part whose jobs each have a table.
    """

    name: str
    title: str
    jobs: Sequence[Job]
    columns: Mapping[str, str] = field(default_factory=dict)


def run_part(
    part: Part, root: Path, deadline: float, known: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Run the jobs of a part.

    Args:
        part: The part.
        root: The repository.
        deadline: `time.monotonic` at which no job may run any more.
        known: Results of an earlier call by the job's name; these jobs are not run.

    Returns:
        ``title``, ``columns``, ``seconds`` and ``jobs``: one result of `run_job` per job.
    """
    known = known or {}
    jobs = [known.get(job.name) or run_job(job, root, deadline) for job in part.jobs]
    seconds = round(sum(job["seconds"] for job in jobs), 1)
    return {"title": part.title, "columns": dict(part.columns), "seconds": seconds, "jobs": jobs}


def run_job(job: Job, root: Path, deadline: float) -> dict[str, Any]:
    """Run one command to its end or its limit.

    Args:
        job: The command.
        root: The repository.
        deadline: `time.monotonic` at which it may not run any more.

    Returns:
        ``name``, ``command``, ``status``, ``reason``, ``seconds`` and ``values``.
    """
    result: dict[str, Any] = {"name": job.name, "command": job.shown, "values": {}}
    left = deadline - time.monotonic()
    limit = min(job.limit, left)
    why_not = job.why_not or ("no time is left" if left < SHORTEST else "")
    if why_not:
        return result | {"status": "skipped", "reason": why_not, "seconds": 0.0}
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = _run(job, root, limit, out, err)
        said, complained = (_text(file) for file in (out, err))
    result["seconds"] = round(time.monotonic() - begin, 1)
    if status is None:
        return result | {"status": "failed", "reason": f"no end within {limit:.0f} s: killed"}
    return result | _judge(job, status, said, complained)


def _run(job: Job, root: Path, limit: float, out: IO[bytes], err: IO[bytes]) -> int | None:
    """Return the exit status, None if the limit was exceeded."""
    process = subprocess.Popen(
        job.command,
        cwd=root,
        env=_environment(job, root),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
        preexec_fn=functools.partial(end_with, os.getpid()),
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The command may have left processes of its own; its ranks end with their launcher.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(job: Job, root: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in _VARIABLES}
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Nothing may wait for a network that is not there.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    return kept | offline | {"PYTHONPATH": os.pathsep.join(paths), **job.variables}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


def _judge(job: Job, status: int, said: str, complained: str) -> dict[str, Any]:
    """Return the result of a command that ended: status, reason and values."""
    first = said.partition("\n")[0].strip()
    if status == 0 and first.startswith("skipped:"):
        return {"status": "skipped", "reason": first.removeprefix("skipped:").strip()}
    values, wrong = {}, ""
    try:
        values = job.read(said)
    except SkippedError as error:
        return {"status": "skipped", "reason": str(error)}
    except (OSError, ValueError, KeyError) as error:
        wrong = f"invalid output: {error!r}"
    expected = values.pop("wrong", "")
    if status:
        wrong = expected or last_error(complained, status)
    if wrong:
        return {"status": "failed", "reason": " ".join(str(wrong).split())[:300], "values": values}
    return {"status": "passed", "reason": "", "values": values}
