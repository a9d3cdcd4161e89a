# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Start training runs from commands and read their results."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from torchtitan_lr.checks.job import Data, check_job_config
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.launch.environment import Environment, read_environment
from torchtitan_lr.launch.placement import Placement, find_device, place
from torchtitan_lr.launch.processes import LAUNCHER_VARIABLE, begin_rank, exit_without_teardown

RANKS_RESULT = "TORCHTITAN_LR_RANKS_RESULT"
"""Environment variable of a module's ranks: the file for rank 0's result."""


@dataclass(frozen=True)
class Started:
    """A training run that `start` has started."""

    process: subprocess.Popen[bytes]
    stderr: IO[str]
    began: float  # seconds since the epoch

    def finish(self) -> None:
        """Wait for the run's end; another exit status than 0 raises a `RunFailedError`."""
        if status := self.process.wait():
            self.stderr.seek(0)
            raise RunFailedError(last_error(self.stderr.read(), status))


def start(
    config: str,
    folder: Path,
    arguments: Sequence[str],
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
) -> Started:
    """Start training through the launcher; a run with a checkpoint resumes."""
    command = [
        *(sys.executable, "-m", "torchtitan_lr", "train"),
        *(f"--job.config_file={config}", f"--job.dump_folder={folder}", *arguments),
    ]
    environment = dict(os.environ) | {"CONFIG_FILE": config} | dict(variables or {})
    if ranks is not None:
        environment["NGPU"] = str(ranks)
    stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when `Started` is freed)
    # In its own session: only this process receives Ctrl-C and passes it on once.
    began = time.time()
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=tuple(keep_open),
        start_new_session=True,
    )
    return Started(process, stderr, began)


def place_run(
    arguments: Sequence[str], ranks: int | None = None, data: Data = "prepare"
) -> Placement:
    """Check a run's configuration and return its ranks, as the launcher chooses them."""
    placed = place(_one_machine(ranks), list(arguments))
    ranks = placed.environment.ranks
    check_job_config(placed.config, ranks, placed.device, data=data)
    return placed


def _one_machine(ranks: int | None) -> Environment:
    environment = read_environment()
    if environment.nodes > 1:
        raise ConfigError("NNODES", environment.nodes, "1: this command starts runs on one machine")
    if environment.comm_mode:
        raise ConfigError("COMM_MODE", environment.comm_mode, "nothing: these runs are real")
    if ranks is not None:
        return replace(environment, ranks=ranks, ranks_given=True)
    return environment


def run_on_ranks(module: str, arguments: Sequence[str], ranks: int | None = None) -> Any:
    """Run a module on this machine's ranks and return rank 0's result.

    Its ranks call `report_from_rank`; a failed one raises a `RunFailedError` with its output's
    file.
    """
    environment = replace(_one_machine(ranks), max_restarts=0)
    find_device(environment)
    from torchtitan_lr.launch.ranks import run_ranks  # late: it imports torch

    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lr-ranks-"))
    result = folder / "result.json"
    variables = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1",
        RANKS_RESULT: str(result),
    }
    command = [module, *arguments, f"--job.dump_folder={folder}"]
    try:
        _, failure = run_ranks(environment, command, folder, variables)
    except BaseException:  # a signal
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if failure is not None:
        raise RunFailedError(f"error: {failure}; its output: {failure.output}")
    found = json.loads(result.read_text())
    shutil.rmtree(folder)
    return found


def report_from_rank(measure: Callable[[list[str]], Any], arguments: list[str]) -> None:
    """Measure and exit if `run_on_ranks` started this process; else do nothing."""
    if RANKS_RESULT not in os.environ:
        return
    begin_rank()
    from torch.distributed.elastic.multiprocessing.errors import record

    found = record(measure)(arguments)
    if os.environ["RANK"] == "0":
        Path(os.environ[RANKS_RESULT]).write_text(json.dumps(found))
    exit_without_teardown(0)


def last_error(output: str, status: int) -> str:
    """Return a program's last line that begins with ``error: ``, else its last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"it ended with status {status}"])[-1]
