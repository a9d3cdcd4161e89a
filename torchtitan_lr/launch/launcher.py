# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher: check a run, start its ranks, stop them cleanly, and print a summary.

The command ``train`` runs it with torchtitan's environment variables (see `commands.train`). An
invalid configuration is reported before any rank starts, in one line, with exit status 2.
"""

import getpass
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import is_finite, newest_step, step_folder
from torchtitan_lr.checks.stored import nothing_to_train
from torchtitan_lr.compat.interpreter import cores
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import CONFIG_FILE_KEY, split_arguments
from torchtitan_lr.errors import ConfigError, escaped
from torchtitan_lr.launch.environment import (
    Environment,
    loopback_variables,
    read_environment,
)
from torchtitan_lr.launch.folder_lock import (
    HELD_VARIABLE,
    SIGNATURE_VARIABLE,
    FolderLock,
    locked,
)
from torchtitan_lr.launch.machines import check_machines, rendezvous_arguments
from torchtitan_lr.launch.placement import DEFAULT_CONFIG_FILE, place
from torchtitan_lr.launch.processes import RankGroup
from torchtitan_lr.launch.report import (
    describe_failure,
    disk_trouble,
    hidden_errors,
    killed_rank,
    read_summary,
    summary_lines,
)
from torchtitan_lr.launch.run_state import (
    EXIT_STATUS,
    FAILED,
    FINISHED,
    REFUSED,
    holder_named,
    is_held,
    read_state,
    write_state,
)


def train_arguments(argv: list[str], environment: Environment) -> list[str]:
    """Complete the command line with the configuration file and the settings of a dry run.

    Args:
        argv: The launcher's arguments; the first may be CONFIG, a TOML file or a shipped name.
        environment: Result of :func:`read_environment`.

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


def build_command(
    environment: Environment, arguments: list[str], log_folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Build the command that starts all ranks of this machine, and its environment.

    torchrun writes each rank's output into ``log_folder``.
    """
    variables = dict(os.environ)
    # torchrun would set 1. Divide all cores among the ranks; more threads than cores are slower.
    if not variables.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // environment.ranks))
    variables["PYTHONUNBUFFERED"] = "1"
    # The run's ranks, not this machine's. `RankGroup` knows their lines by this prefix.
    variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]:"
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name: torch's compiler asks for one
        variables["LOGNAME"] = f"uid_{os.getuid()}"
    if environment.comm_mode:
        variables |= {"NGPU": str(environment.ranks), "LOCAL_RANK": "0", "RANK": "0"}
        return [sys.executable, "-m", environment.train_module, *arguments], variables
    rendezvous = ["--rdzv_backend=loopback"]
    if environment.nodes == 1:
        variables = loopback_variables() | variables
    else:
        rendezvous, gloo = rendezvous_arguments(environment)
        variables = gloo | variables
    if environment.max_restarts:
        rendezvous.append(f"--max_restarts={environment.max_restarts}")
    command = [
        # Unbuffered: of several machines the launcher reads its output line by line.
        *(sys.executable, "-u", "-m", "torchtitan_lr.launch.agent", *rendezvous),
        f"--nproc_per_node={environment.ranks}",
        f"--local-ranks-filter={_tailed_ranks(environment)}",
        *("--role", "rank", "--tee", "3", "--log-dir", str(log_folder)),
        *("-m", environment.train_module, *arguments),
    ]
    return command, variables


def _tailed_ranks(environment: Environment) -> str:
    """Return the local ranks whose lines torchrun passes on.

    Of several machines all: which of them has rank 0 is known when they have met, and `RankGroup`
    chooses by the ranks' numbers in the run.
    """
    if environment.nodes == 1:
        return environment.log_ranks
    return ",".join(map(str, range(environment.ranks)))


def run(
    environment: Environment,
    arguments: list[str],
    log_folder: Path,
    config: Any,
    lock: FolderLock | None,
) -> int:
    """Run all ranks to their end and report; arguments as for `build_command`.

    Args:
        environment: The launch's environment.
        arguments: The command line.
        log_folder: Where the ranks' output goes.
        config: The configuration.
        lock: The dump folder's, if this launcher has locked it.

    Returns:
        The exit status: 0 for a run that finished, or that a signal stopped and that saved.
    """
    dump_folder = Path(config.job.dump_folder)
    begin = time.time()
    # A dry run is one process without torchrun; its output goes to the console.
    expected = 0 if environment.comm_mode else environment.ranks
    command, variables = build_command(environment, arguments, log_folder)
    if environment.nodes == 1:
        from torchtitan_lr.data.prepare import prepare_for_ranks  # late, as are the checks

        variables |= prepare_for_ranks(config)
    if lock is not None:
        variables[HELD_VARIABLE] = os.path.realpath(dump_folder)
        variables[SIGNATURE_VARIABLE] = lock.signature
    shown, missing = None, ""
    if environment.nodes > 1:
        shown = set(map(int, environment.log_ranks.split(",")))
        missing = f"another machine has not come to {environment.endpoint} yet"
    group = RankGroup(command, variables, log_folder / "launcher.log", expected, shown, missing)
    status = group.wait()
    if shown is None:
        shown_here = set(map(int, environment.log_ranks.split(",")))
    else:
        shown_here = {here for rank, here in group.local_ranks.items() if rank in shown}
    if group.killed:
        what = "killed" if group.was_ready else "stopped before training began"
        print(f"error: {what} by {group.signal_name}; logs: {log_folder}", file=sys.stderr)
        _record_failure(lock, dump_folder, f"{what} by {group.signal_name}", FAILED)
        return 128 + group.signal_number
    if expected:
        for line in hidden_errors(log_folder, shown_here):
            print(escaped(line), file=sys.stderr)
    if status != 0:
        if expected:
            failure = describe_failure(log_folder, status)
            advice = _advice(str(failure), environment, variables, log_folder, config)
            print(escaped(f"error: {failure}{advice}"), file=sys.stderr)
            if environment.nodes == 1 or not is_held(dump_folder):
                # What a rank has recorded since stays, unless it only saw a killed one's end.
                since = math.inf if failure.by_signal else begin
                states = {number: state for state, number in EXIT_STATUS.items()}
                state = states.get(status, FAILED)
                _record_failure(lock, dump_folder, str(failure), state, failure.rank, since)
        return status if 0 < status < 126 else 1
    if not expected:
        print(f"dry run passed: one step as rank 0 of {environment.world_size}")
        return 0
    summary = read_summary(dump_folder, newer_than=begin)
    if summary is not None and (environment.nodes == 1 or 0 in group.local_ranks):
        print("\n".join(summary_lines(summary, dump_folder, log_folder)))
    return 0


def _advice(
    failure: str,
    environment: Environment,
    variables: Mapping[str, str],
    log_folder: Path,
    config: Any,
) -> str:
    """Return what to do about a failure of the ranks, as the end of a sentence; may be empty."""
    advice = disk_trouble(Path(config.job.dump_folder), failure)
    if environment.nodes > 1 and "gloo" in failure.lower():
        interface = variables.get("GLOO_SOCKET_IFNAME", "that of the machine's name")
        advice += f"; gloo's interface is {interface}, set by GLOO_SOCKET_IFNAME"
    several = environment.nodes > 1 or environment.max_restarts
    if advice or several or killed_rank(log_folder):
        advice += how_to_resume(config)
    return advice


def _record_failure(
    lock: FolderLock | None,
    dump_folder: Path,
    error: str,
    state: str,
    rank: int | None = None,
    began: float = math.inf,
) -> None:
    """Record why a run failed, unless its folder is another run's by now."""
    with suppress(ConfigError):
        if lock is not None:
            lock()
        write_state(dump_folder, state, error, rank, began=began)


def how_to_resume(config: Any) -> str:
    """Return the checkpoint that a killed run can resume from, as the end of a sentence."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    step = newest_step(folder) if config.checkpoint.enable else -1
    if step < 0 or not is_finite(step_folder(folder, step)):
        return "; there is no checkpoint to resume from"
    return f"; run the same command again to resume from {step_folder(folder, step)}"


def main(argv: list[str] | None = None) -> int:
    """Run the launcher.

    Args:
        argv: Arguments without the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit status: `EXIT_STATUS` of how the run ended, or 128 and the number of the signal
        that killed it.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        environment = read_environment()
        arguments = train_arguments(argv, environment)
        placed = place(environment, arguments)
        environment, arguments, config = placed.environment, placed.arguments, placed.config
        if environment.comm_mode:
            # A folder of its own: do not overwrite the real run's curve.
            arguments.append(f"--job.dump_folder={Path(config.job.dump_folder) / 'dry_run'}")
            config = build_job_config(arguments)
        # The launchers of several machines share the folder; then rank 0 locks it.
        one_machine = environment.nodes == 1
        with holder_named(config.job.dump_folder) if one_machine else nullcontext():
            check_machines(config, environment, placed.device)
        if one_machine and (line := nothing_to_train(config)):
            results = Path(config.job.dump_folder)
            state = read_state(results)
            summary = read_summary(results, newer_than=0)
            # A run that was killed after its last step still has to validate.
            if state is not None and state["state"] == FINISHED and summary is not None:
                print("\n".join([line, *summary_lines(summary, results, results / "logs")]))
                return 0
        if placed.note:
            print(placed.note, flush=True)
        folder = config.job.dump_folder
        with locked(folder) if one_machine else nullcontext() as lock:
            log_folder = Path(folder, "logs", f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
            try:
                log_folder.mkdir(parents=True)
            except OSError as error:
                want = f"a folder in which {log_folder} can be created ({error.strerror})"
                raise ConfigError("job.dump_folder", folder, want) from error
            return run(environment, arguments, log_folder, config, lock)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STATUS[REFUSED]
