# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What commands run on the ranks of this machine: a checked configuration, or a module."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lr.checks.job import Data, check_job_config
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.launch import placement
from torchtitan_lr.launch.placement import Environment, Placement
from torchtitan_lr.launch.processes import LAUNCHER_VARIABLE, begin_rank, exit_without_teardown

RANKS_RESULT = "TORCHTITAN_LR_RANKS_RESULT"
"""Environment variable of a module's ranks: the file for rank 0's result."""


def place_run(
    arguments: Sequence[str], ranks: int | None = None, data: Data = "prepare"
) -> Placement:
    """Check a run's configuration and return its ranks, as the launcher chooses them."""
    placed = placement.place(_one_machine(ranks), list(arguments))
    check_job_config(placed.config, placed.environment.ranks, placed.device, data=data)
    return placed


def _one_machine(ranks: int | None) -> Environment:
    environment = placement.read_environment()
    if environment.nodes > 1:
        raise ConfigError("NNODES", environment.nodes, "1: this command starts runs on one machine")
    if environment.comm_mode:
        raise ConfigError("COMM_MODE", environment.comm_mode, "nothing: these runs are real")
    if ranks is not None:
        return replace(environment, ranks=ranks, ranks_given=True)
    return environment


def run_on_ranks(module: str, arguments: Sequence[str], ranks: int | None = None) -> Any:
    """Run a module, whose ranks call `report_from_rank`, and return rank 0's result.

    A failed rank raises a `RunFailedError` with its output's file.
    """
    environment = replace(_one_machine(ranks), max_restarts=0)
    placement.find_device(environment)
    from torchtitan_lr.launch.ranks import run_ranks  # late: it imports torch

    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lr-ranks-"))
    result = folder / "result.json"
    variables = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1",
        RANKS_RESULT: str(result),
    }
    command = [module, *arguments, f"--job.dump_folder={folder}"]
    _, failure = run_ranks(environment, command, folder, variables)
    if failure is not None:
        raise RunFailedError(f"error: {failure}; its output: {failure.output}")
    found = json.loads(result.read_text())
    shutil.rmtree(folder)
    return found


def report_from_rank(measure: Callable[[list[str]], Any], arguments: list[str]) -> None:
    """Measure as a rank that `run_on_ranks` started, and exit."""
    begin_rank()
    from torch.distributed.elastic.multiprocessing.errors import record

    found = record(measure)(arguments)
    if os.environ["RANK"] == "0":
        Path(os.environ[RANKS_RESULT]).write_text(json.dumps(found))
    exit_without_teardown(0)
