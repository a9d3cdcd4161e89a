# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher: check a run, start its ranks, stop them cleanly, and print a summary.

The command ``train`` runs it with torchtitan's environment variables (see `commands.train`). An
invalid configuration is reported before any rank starts, in one line, with exit status 2.
"""

import getpass
import math
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.checkpoints.folders import is_finite, newest_step, step_folder
from torchtitan_lr.checks.stored import nothing_to_train
from torchtitan_lr.compat.interpreter import cores
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import CONFIG_FILE_KEY, split_arguments
from torchtitan_lr.errors import ConfigError, escaped
from torchtitan_lr.launch.environment import Environment, read_environment
from torchtitan_lr.launch.folder_lock import HELD_VARIABLE, SIGNATURE_VARIABLE, is_ours, locked
from torchtitan_lr.launch.machines import check_machines
from torchtitan_lr.launch.placement import DEFAULT_CONFIG_FILE, Placement, place
from torchtitan_lr.launch.processes import LAUNCHER_VARIABLE, Signals, say
from torchtitan_lr.launch.report import read_summary, summary_lines
from torchtitan_lr.launch.run_state import (
    AGAIN_THE_SAME,
    EXIT_STATUS,
    FAILED,
    FINISHED,
    REFUSED,
    STOPPED,
    holder_named,
    is_held,
    is_since,
    read_state,
    write_state,
)

if TYPE_CHECKING:  # it imports torch
    from torchtitan_lr.compat.elastic import Failure

_LITTLE_SPACE = 1 << 20  # bytes; a disk with less free space counts as full


def train_arguments(argv: list[str], environment: Environment) -> list[str]:
    """Complete the command line with the configuration file and the settings of a dry run.

    The first argument may be CONFIG, a TOML file or a shipped name.

    Raises:
        ConfigError: Two configuration files, or an argument that is no override.
    """
    arguments = list(argv)
    # A first word is CONFIG; one with "=" is an override without its dashes, refused below.
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        arguments[0] = f"--{CONFIG_FILE_KEY}={argv[0]}"
        if any(override.key == CONFIG_FILE_KEY for override in split_arguments(argv[1:])):
            raise ConfigError("CONFIG", argv[0], f"no CONFIG beside --{CONFIG_FILE_KEY}")
    elif all(override.key != CONFIG_FILE_KEY for override in split_arguments(argv)):
        config_file = os.environ.get("CONFIG_FILE") or DEFAULT_CONFIG_FILE
        arguments = [f"--job.config_file={config_file}", *arguments]
    if environment.comm_mode:
        # One step, as in torchtitan's run_train.sh. No checkpoint: the other ranks do not exist,
        # so their parts could not be written.
        mode = f"--comm.mode={environment.comm_mode}"
        arguments += [mode, "--training.steps=1", "--checkpoint.no_enable"]
    return arguments


def rank_variables(environment: Environment) -> dict[str, str]:
    """Return the variables that the ranks find beside those of this process."""
    variables = {LAUNCHER_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    # torchrun would set 1. Divide all cores among the ranks; more threads than cores are slower.
    if not os.environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // environment.ranks))
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name: torch's compiler asks for one
        variables["LOGNAME"] = f"uid_{os.getuid()}"
    if environment.comm_mode:  # the one rank of a dry run pretends that there are so many
        variables["NGPU"] = str(environment.ranks)
    return variables


def run(
    environment: Environment,
    arguments: list[str],
    log_folder: Path,
    config: Any,
    signed: str,  # what `locked` returned; empty with several machines
) -> int:
    """Run the ranks of this machine to their end and report; return the exit status."""
    from torchtitan_lr.data.prepare import prepare_for_ranks  # late, as are the checks
    from torchtitan_lr.launch.ranks import run_ranks

    folder, began = Path(config.job.dump_folder), time.time()
    one_machine = environment.nodes == 1
    variables = rank_variables(environment)
    if one_machine:
        variables |= prepare_for_ranks(config)
        variables[HELD_VARIABLE] = os.path.realpath(folder)
        variables[SIGNATURE_VARIABLE] = signed
    else:
        print(f"waiting for the other machines at {environment.endpoint}", flush=True)

    def may_write() -> bool:
        # Of several machines rank 0 holds the folder.
        return is_ours(folder, signed) if one_machine else not is_held(folder)

    def stopped(why: str) -> int:
        if may_write():
            write_state(folder, STOPPED if signals.restarting else FAILED, why)
        say(f"error: {why}; logs: {log_folder}")
        return 128 + signals.number

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signals = Signals(stopped)
    command = [environment.train_module, *arguments]
    shown = [int(rank) for rank in environment.log_ranks.split(",")]
    has_first, failure = run_ranks(environment, command, log_folder, variables, shown, signals)
    if signals.killed:
        return stopped(signals.why)
    if failure is not None:
        # A rank that trains handles the signal.
        if signals.number and failure.status in (None, -signals.passed_on):
            return stopped(signals.why)
        if may_write():
            record_failure(failure, folder, began)
        say(failure_line(failure, config))
        return failure.status if failure.status in AGAIN_THE_SAME else EXIT_STATUS[FAILED]
    if environment.comm_mode:
        print(f"dry run passed: one step as rank 0 of {environment.world_size}")
    elif has_first and (summary := read_summary(folder, newer_than=began)) is not None:
        print("\n".join(summary_lines(summary, folder, log_folder)))
    elif has_first and 0 not in shown:  # rank 0 says that it was stopped
        state = read_state(folder)
        if state is not None and state["state"] == STOPPED and is_since(state, began):
            say(escaped(f"stopped by {state['error']}{how_to_resume(config)}"))
    return EXIT_STATUS[FINISHED]


def failure_line(failure: "Failure", config: Any) -> str:
    """Say which rank failed, why, where its output is and how to go on."""
    line = f"error: {failure}"
    if failure.status == -signal.SIGKILL:
        line += " (the kernel sends it when memory runs out)"
    folder = config.job.dump_folder
    with suppress(OSError):  # the folder may be gone
        free = shutil.disk_usage(folder).free
        if free < _LITTLE_SPACE:  # the rank may have found no place for its own words
            line += f"; no space left in {folder} ({free / 2**20:.1f} MiB free)"
    line += f"; its output: {failure.output}"
    if failure.status not in AGAIN_THE_SAME:
        line += how_to_resume(config)
    return escaped(line)


def record_failure(failure: "Failure", dump_folder: Path, began: float) -> None:
    """Record a failure that no rank has recorded since a time."""
    states = {number: state for state, number in EXIT_STATUS.items()}
    # Others may have recorded what they saw of the end of a rank that a signal ended.
    since = math.inf if (failure.status or 0) < 0 else began
    state = states.get(failure.status or EXIT_STATUS[FAILED], FAILED)
    write_state(dump_folder, state, str(failure), failure.rank, began=since)


def how_to_resume(config: Any) -> str:
    """Return the checkpoint that a killed run can resume from, as the end of a sentence."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    step = newest_step(folder) if config.checkpoint.enable else -1
    if step < 0 or not is_finite(step_folder(folder, step)):
        return "; there is no checkpoint to resume from"
    return f"; run the same command again to resume from {step_folder(folder, step)}"


def main(argv: list[str] | None = None) -> int:
    """Check a run, lock its folder and run it; return the exit status.

    It is `EXIT_STATUS` of how the run ended, or 128 and the number of the signal that killed it.
    """
    try:
        placed, config = checked(sys.argv[1:] if argv is None else argv)
        one_machine = placed.environment.nodes == 1
        if one_machine and (done := already_finished(config)):
            print("\n".join(done))
            return EXIT_STATUS[FINISHED]
        if placed.note:
            print(placed.note, flush=True)
        folder = config.job.dump_folder
        # The launchers of several machines share the folder; then rank 0 locks it.
        with locked(folder) if one_machine else nullcontext("") as signed:
            log_folder = Path(folder, "logs", f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
            try:
                log_folder.mkdir(parents=True)
            except OSError as error:
                want = f"a folder in which {log_folder} can be created ({error.strerror})"
                raise ConfigError("job.dump_folder", folder, want) from error
            return run(placed.environment, placed.arguments, log_folder, config, signed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STATUS[REFUSED]


def checked(argv: list[str]) -> tuple[Placement, Any]:
    """Return the ranks of a run and its configuration, which can start.

    Raises:
        ConfigError: It cannot.
    """
    environment = read_environment()
    placed = place(environment, train_arguments(argv, environment))
    config = placed.config
    if placed.environment.comm_mode:
        # A folder of its own: do not overwrite the real run's curve.
        placed.arguments.append(f"--job.dump_folder={Path(config.job.dump_folder) / 'dry_run'}")
        config = build_job_config(placed.arguments)
    with holder_named(config.job.dump_folder) if environment.nodes == 1 else nullcontext():
        check_machines(config, placed.environment, placed.device)
    return placed, config


def already_finished(config: Any) -> list[str]:
    """Return what to print for a run that has nothing left to do; empty for any other."""
    line = nothing_to_train(config)
    folder = Path(config.job.dump_folder)
    state, summary = read_state(folder), read_summary(folder, newer_than=0)
    # A run that was killed after its last step still has to validate.
    if not line or summary is None or state is None or state["state"] != FINISHED:
        return []
    return [line, *summary_lines(summary, folder, folder / "logs")]
