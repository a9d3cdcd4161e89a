# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the runs below a folder, and compare their curves.

    torchtitan-lr runs outputs
    torchtitan-lr runs outputs/a outputs/b --plot curves.png
    torchtitan-lr runs outputs/ranks --sort validation --columns optimizer.lr,low_rank.rank

A run is a dump folder, with metrics.jsonl, or with job_config.json and run.lock. Its state is
"running" (a process holds its run.lock), "finished", "stopped" (by a signal, after a checkpoint) or
"failed", and why. The losses are those of a summary, in nats per token. Below the table are the
keys in which the runs differ, and what all share; --columns lists other keys, and --sort orders the
runs by a column or a key. What is damaged in a run's files is shown as unknown.

Exit status: 0 success, 1 there is no run, 2 invalid arguments.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import RUN_CONFIG
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.schema import FREE, NO_EFFECT, meanings
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError, escaped, one_of
from torchtitan_lr.launch import run_state
from torchtitan_lr.launch.folder_lock import LOCK_FILE, is_held
from torchtitan_lr.training import history as logged

_NOT_SEARCHED = {"checkpoint", "logs", "tb", "wandb", "comm_traces"}


@dataclass(frozen=True)
class RunInfo:
    """A run in the list."""

    folder: str
    config: str  # its TOML file, else its model and flavor
    step: int  # the last logged step, 0 if there is none
    steps: int | None  # the last step of the configuration, None if that is unknown
    state: str  # running, finished, stopped or failed
    why: str  # why it stopped or failed; empty if it did not
    loss: float | None  # the last training loss, as in a summary, nats per token
    val_loss: float | None  # the last validation loss, nats per token
    # Its values of the keys in which the listed runs differ, or of chosen ones
    settings: dict[str, Any] = field(default_factory=dict)
    # Ranks, tokens per step, torch and commit, where they are those of all listed runs
    shared: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: OneLineParser) -> None:
    """Add the folders and the options."""
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, default=[Path("outputs")])
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="losses of all listed runs")
    parser.add_argument("--sort", default="run", metavar="KEY", help="a column or a key; - is last")
    keys = "keys to list (default: those in which the runs differ)"
    parser.add_argument("--columns", default="", metavar="KEY,KEY", help=keys)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the list and draw the picture; return the exit status."""
    if args.plot is not None and args.plot.suffix != ".png":
        raise ConfigError("--plot", str(args.plot), "a name that ends in .png")
    runs = [describe(folder) for folder in find_runs(args.paths)]
    runs = with_settings(runs, [*filter(None, args.columns.split(","))])
    runs = ordered(runs, args.sort)
    if not runs:
        below = escaped(", ".join(map(str, args.paths)))
        print(f"error: there is no run below {below}", file=sys.stderr)
        return 1
    if args.plot is not None:
        plot(runs, args.plot)
    print(json.dumps([asdict(info) for info in runs], indent=1) if args.json else as_text(runs))
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


def describe(folder: Path) -> RunInfo:
    """Read a run's configuration, history and state."""
    config = _read_json(folder / RUN_CONFIG)
    history = logged.read_history(folder / logged.HISTORY_FILE)
    job, model, training = (_table(config, name) for name in ("job", "model", "training"))
    name = job.get("config_file")
    if not name or not isinstance(name, str):
        found = [model.get(key) for key in ("name", "flavor")]
        name = " ".join(value for value in found if isinstance(value, str))
    steps = training.get("steps")
    steps = steps if type(steps) is int and logged.is_number(steps) else None
    step = max((record["step"] for record in history), default=0)
    state, why = _state_of(folder, step)
    return RunInfo(
        folder=str(folder),
        config=name or "-",
        step=step,
        steps=steps,
        state=state,
        why=why,
        loss=_last([logged.train_loss(record) for record in history]),
        val_loss=_last([record.get(logged.VALIDATION_LOSS) for record in history]),
    )


_DERIVED = {
    *("checkpoint.enable", "checkpoint.interval", "checkpoint.keep_latest_k"),
    *("validation.freq", "validation.local_batch_size", "training.local_batch_size"),
    *("training.global_batch_size", "lr_scheduler.warmup_steps"),
}
"""Keys that no loss depends on, or only through others that are shown."""


def with_settings(runs: list[RunInfo], columns: list[str]) -> list[RunInfo]:
    """Return the runs with their values of some keys, else of common ones in which they differ."""
    records = [_settings(_read_json(Path(run.folder) / RUN_CONFIG)) for run in runs]
    known = [record for record in records if record]
    for key in columns:
        if not any(key in record for record in known):
            every = chain.from_iterable(known)
            raise ConfigError("--columns", key, f"keys of the runs, {one_of(every, key)}")
    keys = columns or _keys_that_differ(known)
    shared = [key for key in _ENVIRONMENT if len({repr(record.get(key)) for record in known}) == 1]
    found = []
    for run, record in zip(runs, records, strict=True):
        settings = {key: record[key] for key in keys if key in record}
        same = {key: record[key] for key in shared if key in record}
        found.append(replace(run, settings=settings, shared=same))
    return found


_ENVIRONMENT = tuple(
    f"environment.{key}" for key in ("ranks", "tokens_per_step", "torch", "commit")
)
"""Keys that `run_record.environment_of` fills."""


def ordered(runs: list[RunInfo], key: str) -> list[RunInfo]:
    """Return the runs in the ascending order of a column of the table, or of a listed key."""
    columns = {"run": "folder", "config": "config", "step": "step", "state": "state"}
    columns |= {"loss": "loss", "validation": "val_loss"}
    keys = dict.fromkeys(chain.from_iterable(run.settings for run in runs))
    if key not in (*columns, *keys):
        raise ConfigError("--sort", key, one_of((*columns, *keys), key))

    def place(run: RunInfo) -> tuple[int, float, str]:
        value = getattr(run, columns[key]) if key in columns else run.settings.get(key)
        if isinstance(value, (int, float)) and logged.is_number(value):
            return 0, float(value), ""
        return (2, 0.0, "") if value is None else (1, 0.0, str(value))

    return sorted(runs, key=place)


def _keys_that_differ(records: list[dict[str, Any]]) -> list[str]:
    """Return the keys that all records have, and not all with one value, but derived ones."""
    if not records:
        return []
    first, *others = records
    keys, free = [], {key for key, meaning in meanings().items() if meaning is FREE}
    for key, value in first.items():
        shared = key not in _DERIVED | free and all(key in other for other in others)
        if shared and any(other[key] != value for other in others):
            keys.append(key)
    return keys


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a record by their dotted keys, without those of places and logs."""
    found: dict[str, Any] = {}
    for section, table in config.items():
        if isinstance(table, dict) and section not in NO_EFFECT:
            found |= {f"{section}.{key}": value for key, value in table.items()}
    flavor = found.get("model.flavor")
    if isinstance(flavor, str) and flavor.endswith(".json"):  # of an experiment: its folder is said
        found["model.flavor"] = Path(flavor).stem
    return found


def _state_of(folder: Path, step: int) -> tuple[str, str]:
    """Return a run's state, and why it stopped or failed."""
    if is_held(folder):
        return run_state.RUNNING, ""
    record = run_state.read_state(folder)
    if not record:  # lost, or copied without it
        return run_state.STOPPED, f"after step {step}; why is not recorded"
    if record["state"] == run_state.RUNNING:
        return run_state.FAILED, "killed, or its machine was: it could not record why"
    return record["state"], str(record.get("error") or "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _last(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None


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
    text = [f"{line:<{width}}  {state}" for line, state in zip(lines, states, strict=True)]
    keys = list(dict.fromkeys(chain.from_iterable(run.settings for run in runs)))
    if keys:
        values = []
        for run in runs:
            values.append([run.folder, *(str(run.settings.get(key, "-")) for key in keys)])
        last = [key.rpartition(".")[2] for key in keys]
        names = [s if last.count(s) == 1 else k for k, s in zip(keys, last, strict=True)]
        table = text_table(["run", *names], values, left=1 + len(keys))
        text += ["", "they differ in", *(line.rstrip() for line in table.splitlines())]
    if shared := next((run.shared for run in runs if run.shared), None):
        parts = [f"{key.rpartition('.')[2]} {value}" for key, value in shared.items()]
        text += ["", escaped(f"all have {', '.join(parts)}")]
    return "\n".join(text)


def plot(runs: list[RunInfo], path: Path) -> None:
    """Draw the losses of several runs in one picture."""
    from torchtitan_lr.training.figures import draw_runs

    histories = {
        run.folder: logged.read_history(Path(run.folder) / logged.HISTORY_FILE) for run in runs
    }
    common = os.path.commonpath([str(Path(name).parent) for name in histories] or [""])
    short = {os.path.relpath(name, common or "."): rows for name, rows in histories.items()}
    drawn = {}
    for name, rows in short.items():
        if any(logged.TRAIN_LOSS in row for row in rows):
            drawn[name] = rows
    if not drawn:
        raise ConfigError("--plot", str(path), "runs with at least one logged step")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        draw_runs(drawn, path)
    except OSError as error:
        raise ConfigError("--plot", str(path), f"a file to write ({error.strerror})") from error
