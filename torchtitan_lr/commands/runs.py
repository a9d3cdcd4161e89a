# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the runs below a folder, and compare their curves.

    torchtitan-lr runs outputs
    torchtitan-lr runs outputs/a outputs/b --plot curves.png

A run is a dump folder, with job_config.json or metrics.jsonl. Its state is "running" (a process
holds its run.lock), "finished", "stopped" (by a signal, after a checkpoint) or "failed", and why.
The losses are the last ones, in nats per token. What is damaged in a run's files is shown as
unknown.

Exit status: 0 success, 1 there is no run, 2 invalid arguments.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import RUN_CONFIG
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError, escaped
from torchtitan_lr.launch.run_state import (
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    is_held,
    read_state,
)
from torchtitan_lr.training.history import (
    HISTORY_FILE,
    SUMMARY_FILE,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    is_number,
    read_history,
)

_NOT_SEARCHED = {"checkpoint", "logs", "tb", "wandb", "comm_traces"}


@dataclass(frozen=True)
class RunInfo:
    """A run in the list.

    Args:
        folder: Its dump folder.
        config: Its TOML file, else its model and flavor.
        step: The last logged step, 0 if there is none.
        steps: The last step of the configuration, None if that is unknown.
        state: running, finished, stopped or failed.
        why: Why it stopped or failed; empty if it did not.
        loss: The last training loss, nats per token.
        val_loss: The last validation loss, nats per token.
    """

    folder: str
    config: str
    step: int
    steps: int | None
    state: str
    why: str
    loss: float | None
    val_loss: float | None


def add_arguments(parser: OneLineParser) -> None:
    """Add the folders and the options."""
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, default=[Path("outputs")])
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="losses of all listed runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the list and draw the picture; return the exit status."""
    if args.plot is not None and args.plot.suffix != ".png":
        raise ConfigError("--plot", str(args.plot), "a name that ends in .png")
    runs = [describe(folder) for folder in find_runs(args.paths)]
    if not runs:
        below = escaped(", ".join(map(str, args.paths)))
        print(f"error: there is no run below {below}", file=sys.stderr)
        return 1
    if args.plot is not None:
        plot(runs, args.plot)
    print(json.dumps([asdict(info) for info in runs], indent=1) if args.json else as_text(runs))
    return 0


def find_runs(paths: list[Path]) -> list[Path]:
    """Return the dump folders at and below some folders, in order of their names.

    Raises:
        ConfigError: A path is no folder.
    """
    found = set()
    for path in paths:
        if not path.is_dir():
            want = "a folder that exists; `torchtitan-lr train` makes ./outputs with its first run"
            raise ConfigError("PATH", str(path), want)
        for folder, names, files in os.walk(path):
            names[:] = [name for name in names if name not in _NOT_SEARCHED]
            if RUN_CONFIG in files or HISTORY_FILE in files:
                found.add(Path(folder))
    return sorted(found)


def describe(folder: Path) -> RunInfo:
    """Read a run's configuration, history and state.

    Args:
        folder: Its dump folder.
    """
    config = _read_json(folder / RUN_CONFIG)
    history = read_history(folder / HISTORY_FILE)
    job, model, training = (_table(config, name) for name in ("job", "model", "training"))
    name = job.get("config_file")
    if not name or not isinstance(name, str):
        found = [model.get(key) for key in ("name", "flavor")]
        name = " ".join(value for value in found if isinstance(value, str))
    steps = training.get("steps")
    steps = steps if type(steps) is int and is_number(steps) else None
    step = max((record["step"] for record in history), default=0)
    state, why = _state_of(folder, step, steps)
    return RunInfo(
        folder=str(folder),
        config=name or "-",
        step=step,
        steps=steps,
        state=state,
        why=why,
        loss=_last(history, TRAIN_LOSS),
        val_loss=_last(history, VALIDATION_LOSS),
    )


def _state_of(folder: Path, step: int, steps: int | None) -> tuple[str, str]:
    """Return a run's state, and why it stopped or failed."""
    if is_held(folder):
        return RUNNING, ""
    record = read_state(folder)
    if not record:  # of a version without this record
        summary = _read_json(folder / SUMMARY_FILE)
        if steps is not None and summary.get("steps") == steps:
            return FINISHED, ""
        return STOPPED, f"after step {step}; why is not recorded"
    if record["state"] == RUNNING:
        return FAILED, "killed, or its machine was: it could not record why"
    return record["state"], str(record.get("why") or "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _last(history: list[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in history if record.get(key) is not None]
    return values[-1] if values else None


def as_text(runs: list[RunInfo]) -> str:
    """Return a table of runs."""
    header = ["run", "config", "step", "loss", "validation", "state"]
    rows = []
    for run in runs:
        step = f"{run.step}/{'?' if run.steps is None else run.steps}"
        losses = ["-" if loss is None else f"{loss:.4f}" for loss in (run.loss, run.val_loss)]
        state = f"{run.state}: {run.why}" if run.why else run.state
        rows.append([run.folder, run.config, step, *losses, state])
    lines = text_table([*header[:5], ""], [[*row[:5], ""] for row in rows], left=2).splitlines()
    # The last column may be long: it is not padded.
    states = [header[5], *(escaped(row[5]) for row in rows)]
    width = max(map(len, lines))
    return "\n".join(f"{line:<{width}}  {s}" for line, s in zip(lines, states, strict=True))


def plot(runs: list[RunInfo], path: Path) -> None:
    """Draw the losses of several runs in one picture.

    Args:
        runs: The runs; those without a logged step are left out.
        path: The PNG to write.

    Raises:
        ConfigError: No run has a logged step, or the file cannot be written.
    """
    from torchtitan_lr.scaling.pictures import draw_runs

    histories = {run.folder: read_history(Path(run.folder) / HISTORY_FILE) for run in runs}
    common = os.path.commonpath([str(Path(name).parent) for name in histories] or [""])
    short = {os.path.relpath(name, common or "."): rows for name, rows in histories.items()}
    drawn = {}
    for name, rows in short.items():
        if any(TRAIN_LOSS in row for row in rows):
            drawn[name] = rows
    if not drawn:
        raise ConfigError("--plot", str(path), "runs with at least one logged step")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        draw_runs(drawn, path)
    except OSError as error:
        raise ConfigError("--plot", str(path), f"a file to write ({error.strerror})") from error
