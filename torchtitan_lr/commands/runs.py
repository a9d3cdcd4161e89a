# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the runs below a folder, and compare their curves.

    torchtitan-lr runs outputs
    torchtitan-lr runs outputs/a outputs/b --plot curves.png

The first table has each run's state, step and losses; why a run stopped or failed stands below it.
The second has the keys in which the runs differ. What is damaged in a run's files is unknown.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import RUN_CONFIG
from torchtitan_lr.checkpoints.run_record import by_key
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.schema import FREE, NO_EFFECT, meanings
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.errors import ConfigError, escaped, require
from torchtitan_lr.launch import run_folder
from torchtitan_lr.launch.run_folder import LOCK_FILE, is_held
from torchtitan_lr.training import history as logged

_NOT_SEARCHED = {"checkpoint", "logs", "tb", "wandb", "comm_traces"}

_DERIVED = {
    *("checkpoint.enable", "checkpoint.interval", "checkpoint.keep_latest_k"),
    *("validation.freq", "validation.local_batch_size", "training.local_batch_size"),
    *("training.global_batch_size", "lr_scheduler.warmup_steps"),
}
"""Keys that no loss depends on, or only through others that are shown."""

COLUMNS = ("run", "config", "state", "step", "loss", "validation")

Row = dict[str, Any]
"""A run: `COLUMNS`, ``steps``, ``why`` (it stopped or failed), and its settings by dotted key."""


def add_arguments(parser: OneLineParser) -> None:
    """Add the folders and the options."""
    usual = {"default": [Path("outputs")], "help": "default: outputs"}
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, **usual)
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="losses of all listed runs")
    parser.add_shared("--json")


def run(args: argparse.Namespace) -> int:
    """Print the list and draw the picture; return the exit status."""
    named = args.plot is None or args.plot.suffix == ".png"
    require(named, "--plot", str(args.plot), "a name that ends in .png")
    rows = [describe(folder) for folder in find_runs(args.paths)]
    if not rows:
        below = escaped(", ".join(map(str, args.paths)))
        print(f"error: there is no run below {below}", file=sys.stderr)
        return 1
    keys = keys_that_differ(rows)
    if args.plot is not None:
        plot(rows, args.plot)
    if args.json:
        shown = (*COLUMNS, "steps", "why", *keys)
        print(json.dumps([{key: row.get(key) for key in shown} for row in rows], indent=1))
    else:
        print(as_text(rows, keys))
    return 0


def find_runs(paths: list[Path]) -> list[Path]:
    """Return the dump folders at and below some folders, in order of their names."""
    found = set()
    for path in paths:
        if not path.is_dir():
            want = "a folder that exists; `torchtitan-lr train` makes ./outputs with its first run"
            raise ConfigError("PATH", str(path), want)
        for folder, names, files in os.walk(path):
            names[:] = [name for name in names if name not in _NOT_SEARCHED]
            # What `import` wrote has a record too, but no run was there.
            if logged.HISTORY_FILE in files or {RUN_CONFIG, LOCK_FILE} <= set(files):
                found.add(Path(folder))
    return sorted(found)


def describe(folder: Path) -> Row:
    """Read a run's configuration, history and state."""
    settings = _settings(folder)
    history = logged.read_history(folder / logged.HISTORY_FILE)
    model = [settings[key] for key in ("model.name", "model.flavor") if settings.get(key)]
    step = max((record["step"] for record in history), default=0)
    state, why = _state_of(folder, step)
    return {
        "run": str(folder),
        "config": str(settings.get("job.config_file") or " ".join(map(str, model)) or "-"),
        "state": state,
        "why": why,
        "step": step,
        "steps": settings.get("training.steps", "?"),
        "loss": _last([logged.train_loss(record) for record in history]),
        "validation": _last([record.get(logged.VALIDATION_LOSS) for record in history]),
        **settings,
    }


def _settings(folder: Path) -> dict[str, Any]:
    """Return the values of a run's record by their dotted keys; none of a damaged one."""
    try:
        found = by_key(read_json(folder / RUN_CONFIG))
    except (OSError, ValueError):
        return {}
    flavor = found.get("model.flavor")
    if isinstance(flavor, str) and flavor.endswith(".json"):  # of an experiment: its folder is said
        found["model.flavor"] = Path(flavor).stem
    return found


def _state_of(folder: Path, step: int) -> tuple[str, str]:
    """Return a run's state, and why it stopped or failed."""
    if is_held(folder):
        return run_folder.RUNNING, ""
    record = run_folder.read_state(folder)
    if not record:  # lost, or copied without it
        return run_folder.STOPPED, f"after step {step}; why is not recorded"
    if record["state"] == run_folder.RUNNING:
        return run_folder.FAILED, "killed, or its machine was: it could not record why"
    return record["state"], str(record.get("error") or "")


def _last(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None


def keys_that_differ(rows: list[Row]) -> list[str]:
    """Return the keys that all records have, and not all with one value, but derived ones."""
    records = [row for row in rows if any("." in key for key in row)]
    left_out = _DERIVED | {key for key, meaning in meanings().items() if meaning is FREE}
    keys = []
    for key in records[0] if records else ():
        values = [record[key] for record in records if key in record]
        differ = len(values) == len(records) and any(value != values[0] for value in values)
        if differ and "." in key and key.partition(".")[0] not in NO_EFFECT and key not in left_out:
            keys.append(key)
    return keys


def as_text(rows: list[Row], keys: list[str]) -> str:
    """Return a table of runs, why they stopped or failed, and a table of some of their keys."""
    lines = []
    for row in rows:
        losses = ["-" if row[key] is None else f"{row[key]:.4f}" for key in ("loss", "validation")]
        names = [row["run"], row["config"], row["state"]]
        lines.append([*names, f"{row['step']}/{row['steps']}", *losses])
    text = [text_table(COLUMNS, lines, left=3)]
    if whys := [escaped(f"{row['run']}: {row['why']}") for row in rows if row["why"]]:
        text += ["", *whys]
    if keys:
        values = [[row["run"], *(str(row.get(key, "-")) for key in keys)] for row in rows]
        text += ["", text_table(["run", *keys], values, left=1 + len(keys))]
    return "\n".join(text)


def plot(rows: list[Row], path: Path) -> None:
    """Draw the losses of several runs in one picture."""
    from torchtitan_lr.training.figures import draw_runs

    drawn = {}
    for row in rows:
        history = logged.read_history(Path(row["run"]) / logged.HISTORY_FILE)
        if any(logged.TRAIN_LOSS in record for record in history):
            drawn[row["run"]] = history
    require(drawn, "--plot", str(path), "runs with at least one logged step")
    draw_runs(drawn, path)
