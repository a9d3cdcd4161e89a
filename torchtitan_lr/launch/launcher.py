# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher: check a run, start its ranks, stop them cleanly, and print a summary.

The command ``train`` runs it with torchtitan's environment variables (see `commands.train`). An
invalid configuration is reported before any rank starts, in one line, with exit status 2.
"""

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from torchtitan_lr.checkpoints.folders import is_finite, newest_step, step_folder
from torchtitan_lr.checks.job import Data
from torchtitan_lr.checks.stored import nothing_to_train
from torchtitan_lr.compat.interpreter import cores
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.parse import CONFIG_FILE_KEY, split_arguments
from torchtitan_lr.console.log import say
from torchtitan_lr.errors import ConfigError, LostDeviceError, escaped, require
from torchtitan_lr.launch import placement, run_folder
from torchtitan_lr.launch.placement import Environment, Placement
from torchtitan_lr.launch.processes import LAUNCHER_VARIABLE, Signals
from torchtitan_lr.launch.run_folder import AGAIN_THE_SAME, EXIT_STATUS, FAILED, FINISHED, LOST
from torchtitan_lr.training.history import SUMMARY_FILE, is_number

if TYPE_CHECKING:  # it imports torch
    from torchtitan_lr.compat.elastic import Failure


def train_arguments(argv: list[str], environment: Environment) -> list[str]:
    """Complete the command line with the configuration file and the settings of a dry run.

    The first argument may be CONFIG, a TOML file or a shipped name.
    """
    arguments, main_job = list(argv), os.environ.get("CONFIG_FILE") or placement.DEFAULT_CONFIG_FILE
    # A first word is CONFIG; one with "=" is an override without its dashes, refused below.
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        twice = any(override.key == CONFIG_FILE_KEY for override in split_arguments(argv[1:]))
        require(not twice, "CONFIG", argv[0], f"no CONFIG beside --{CONFIG_FILE_KEY}")
        arguments[0] = f"--{CONFIG_FILE_KEY}={argv[0]}"
    elif all(override.key != CONFIG_FILE_KEY for override in split_arguments(argv)):
        arguments = [f"--job.config_file={main_job}", *arguments]
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
    if environment.comm_mode:  # the one rank of a dry run pretends that there are so many
        variables["NGPU"] = str(environment.ranks)
    elif placement.gpu_count():
        variables[placement.GPUS_VARIABLE] = str(environment.ranks)
    return variables


def run(
    placed: Placement,
    log_folder: Path,
    signed: str,  # what `locked` returned; empty with several machines
    tell: Callable[[Placement], object],  # runs beside the ranks, where rank 0 is one
) -> int:
    """Run the ranks of this machine to their end and report; return the exit status."""
    from torchtitan_lr.data.prepare import prepare_for_ranks  # late, as are the checks
    from torchtitan_lr.launch.ranks import run_ranks

    environment, config, began = placed.environment, placed.config, time.time()
    folder, variables = Path(config.job.dump_folder), rank_variables(environment)
    if environment.nodes == 1:
        variables |= prepare_for_ranks(config) | {run_folder.HELD_VARIABLE: signed}
    else:
        print(f"waiting for the other machines at {environment.endpoint}", flush=True)

    def stopped(why: str) -> int:
        record(config.job.dump_folder, signed, FAILED, why)
        say(f"error: {why}; logs: {log_folder}")
        return 128 + signals.number

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signals = Signals(stopped)
    ended, shown = Event(), environment.shown()
    if not environment.comm_mode:
        about = signals, ended, partial(tell, placed)
        Thread(target=_once_started, args=about, daemon=True).start()
    # A module without `begin_rank` outlives a launcher that is killed.
    command = [os.environ.get("TRAIN_FILE") or "torchtitan_lr.train", *placed.arguments]
    has_first, failure = run_ranks(environment, command, log_folder, variables, shown, signals)
    ended.set()
    if environment.nodes == 1:  # another machine's ranks may still write a record
        with suppress(OSError):
            (folder / config.comm.save_traces_folder).rmdir()
    # A rank that trains handles the signal.
    died = failure is not None and failure.status in (None, -signals.passed_on)
    if signals.killed or (signals.number and died):
        return stopped(signals.why)
    if failure is not None:
        return failed(failure, config, signed, began)
    if environment.comm_mode:
        print(f"dry run passed: one step as rank 0 of {environment.world_size}")
    elif has_first and (summary := read_summary(folder, newer_than=began)) is not None:
        print("\n".join(summary_lines(summary, folder, log_folder)))
    return EXIT_STATUS[FINISHED]


def record(
    folder: str, signed: str, state: str, why: str, rank: int | None = None, since: float = math.inf
) -> None:
    """Record the end of a run that rank 0 may not have recorded."""
    with suppress(ConfigError):  # the folder is another run's now, which has its own record
        if signed:
            run_folder.check_ours(folder, signed)
        if signed or not run_folder.is_held(folder):  # of several machines rank 0 holds it
            run_folder.write_state(folder, state, why, rank, began=since)


def failed(failure: "Failure", config: Any, signed: str, began: float) -> int:
    """Record and tell why ranks have failed that began at a time; return the exit status."""
    named = (state for state in run_folder.FAILURES if EXIT_STATUS[state] == failure.status)
    state = next(named, FAILED)
    # Others may have recorded what they saw of the end by a signal, or of a lost GPU.
    since = math.inf if (failure.status or 0) < 0 or state == LOST else began
    record(config.job.dump_folder, signed, state, str(failure), failure.rank, since)
    say(failure_line(failure, config))
    return EXIT_STATUS[state]


def _once_started(signals: Signals, ended: Event, tell: Callable[[], object]) -> None:
    """Call a function once the ranks have started, on the machine of rank 0."""
    while signals.agent is None or signals.agent.meeting:
        if ended.wait(0.1):  # without a start
            return
    if signals.agent.first_rank == 0:
        try:
            tell()
        except Exception as error:  # the ranks train
            say(f"warning: no modelled time: {type(error).__name__}: {error}")


def failure_line(failure: "Failure", config: Any) -> str:
    """Say which rank failed, why, where its output is and how to go on."""
    line = f"error: {failure}"
    if failure.status == EXIT_STATUS[run_folder.DIVERGED]:  # all ranks end so; the text names one
        line = f"error: {failure.error}"
    if failure.status == -signal.SIGKILL:
        line += " (the kernel sends it when memory runs out)"
    folder = config.job.dump_folder
    with suppress(OSError):  # the folder may be gone
        free = shutil.disk_usage(folder).free / 2**20
        if free < 1:  # the rank may have found no place for its own words
            line += f"; no space left in {folder} ({free:.1f} MiB free)"
    line += f"; its output: {failure.output}"
    if failure.status not in AGAIN_THE_SAME or failure.status == EXIT_STATUS[LOST]:
        line += how_to_resume(config)
    return escaped(line)


def how_to_resume(config: Any) -> str:
    """Return the checkpoint that a killed run can resume from, as the end of a sentence."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    step = newest_step(folder) if config.checkpoint.enable else -1
    if step < 0 or not is_finite(step_folder(folder, step)):
        return "; there is no checkpoint to resume from"
    return f"; run the same command again to resume from {step_folder(folder, step)}"


def main(
    argv: list[str] | None = None, tell: Callable[[Placement], object] = lambda placed: None
) -> int:
    """Check a run, lock its folder and run it; return the exit status.

    `tell` says something of it beside its start, once. The status is `EXIT_STATUS` of how the run
    ended, or 128 and the number of the signal that killed it.
    """
    try:
        placed = checked(sys.argv[1:] if argv is None else argv)
        one_machine = placed.environment.nodes == 1
        if one_machine and (done := already_finished(placed.config)):
            print("\n".join(done))
            return EXIT_STATUS[FINISHED]
        if placed.note:
            print(placed.note, flush=True)
        folder = placed.config.job.dump_folder
        # The launchers of several machines share the folder; then rank 0 locks it.
        with run_folder.locked(folder) if one_machine else nullcontext("") as signed:
            log_folder = Path(folder, "logs", f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
            log_folder.mkdir(parents=True)
            return run(placed, log_folder, signed, tell)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STATUS[LOST if isinstance(error, LostDeviceError) else run_folder.REFUSED]


def checked(argv: list[str], data: Data = "prepare") -> Placement:
    """Return the ranks of a run that can start, or raise a ConfigError."""
    environment = placement.read_environment()
    placed = placement.place(environment, train_arguments(argv, environment))
    placed.environment.shown()
    if environment.comm_mode:
        # A folder of its own: do not overwrite the real run's curve.
        job = placed.config.job
        job.dump_folder = str(Path(job.dump_folder) / "dry_run")
        placed.arguments.append(f"--job.dump_folder={job.dump_folder}")
    folder = placed.config.job.dump_folder
    if environment.nodes == 1 and run_folder.is_held(folder):
        raise run_folder.taken(folder)  # what a check would find changes while that job trains
    placement.check_machines(placed.config, placed.environment, placed.device, data)
    return placed


def already_finished(config: Any) -> list[str]:
    """Return what to print for a run that has nothing left to do; empty for any other."""
    line = nothing_to_train(config)
    folder = Path(config.job.dump_folder)
    state, summary = run_folder.read_state(folder), read_summary(folder, newer_than=0)
    # A run that was killed after its last step still has to validate.
    if not line or summary is None or state is None or state["state"] != FINISHED:
        return []
    return [line, *summary_lines(summary, folder, folder / "logs")]


def read_summary(dump_folder: Path, newer_than: float) -> dict[str, Any] | None:
    """Return the keys of ``summary.json``; None for one from before a time, of another run."""
    path = dump_folder / SUMMARY_FILE
    try:
        return read_json(path) if path.stat().st_mtime >= newer_than else None
    except (OSError, ValueError):  # there is none, or it is damaged
        return None


def summary_lines(summary: dict[str, Any], dump_folder: Path, log_folder: Path) -> list[str]:
    """Format a summary for the console; what is unknown, or damaged in the file, is a dash."""

    def number(key: str, form: str, unit: str = "", values: dict[str, Any] = summary) -> str:
        value = values.get(key)
        return format(value, form) + unit if is_number(value) else "-"

    found = summary.get("val_losses")
    sets = found if isinstance(found, dict) else {}
    rows = {
        "steps": number("steps", ".0f"),
        "train loss": number("train_loss", ".4f", " nats/token"),
        "validation loss": number("val_loss", ".4f", " nats/token"),
        **{f"validation loss of {name}": number(name, ".4f", " nats/token", sets) for name in sets},
        "unigram entropy": number("unigram_entropy", ".4f", " nats/token (validation tokens)"),
        "validation perplexity": number("val_ppl", ".2f"),
        "tokens/s": number("tokens_per_s", ",.0f", " (all ranks)"),
        "MFU": number("mfu", ".2f", " %") if summary.get("mfu") is not None else "unknown peak",
        "peak memory": number("peak_memory_gib", ".2f", " GiB (largest rank)"),
    }
    sent, adamw = summary.get("sent_bytes"), summary.get("adamw_bytes")
    if sent is not None and adamw is not None and is_number(sent) and is_number(adamw):
        usual = f"AdamW {adamw / 1e6:.1f}"
        rows["gradients sent"] = f"{sent / 1e6:.1f} MB per step by formula ({usual})"
    for key in ("checkpoint", "curve"):
        rows[key] = str(summary.get(key) or "none")
    rows |= {"summary": str(dump_folder / SUMMARY_FILE), "logs": str(log_folder)}
    width = max(map(len, rows))
    return [f"{name:<{width}}  {escaped(value)}" for name, value in rows.items()]
