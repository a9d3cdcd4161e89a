# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the shipped configurations, or show what a run would use and where each key comes from.

    torchtitan-lr config list
    torchtitan-lr config show debug_cola
    torchtitan-lr config show my.toml --training.steps=100 --changed
    torchtitan-lr config show outputs/checkpoint/step-100

The output of `show` is a TOML file; of a run's or a step's folder, what that was trained with.
Behind each key is its origin:

    default         of this package or of torchtitan; "default of Muon": of that optimizer, also
                    where a file sets the rate of another one
    a TOML file     the one that sets it: CONFIG, or a file that it includes
    command line    an override
    warmup_ratio    warm-up, a share of the steps
    launcher        changed to fit the ranks: NGPU, or the GPUs of this machine

The model that model.flavor and the keys give stands below, as comments. A configuration that
cannot run here is shown too, with the reason on stderr; its corpus is not read.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, STEP_FILE, is_complete
from torchtitan_lr.checkpoints.record import DamagedError, read_step
from torchtitan_lr.checkpoints.run_record import CHANGES, described
from torchtitan_lr.checks.values import check_model
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.config import parse
from torchtitan_lr.config.build import build_job_config, config_class, with_own_rates
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.paths import shipped_configs, shown_config
from torchtitan_lr.config.schema import Model, Training, least_ranks
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.launch.placement import check_machines, place, read_environment
from torchtitan_lr.models.configured import llama_args
from torchtitan_lr.optim.entries import ENTRIES

DEFAULT, SHARE, MODEL = "default", "warmup_ratio", "model"
COMMAND_LINE, LAUNCHER, RUN = "command line", "launcher", "run"


class Setting(NamedTuple):
    """One value of a run."""

    key: str  # the dotted key
    value: Any  # what the run uses
    origin: str  # `DEFAULT`, `SHARE`, `MODEL`, `COMMAND_LINE`, `LAUNCHER`, `RUN` or the TOML file


def add_arguments(parser: OneLineParser) -> None:
    """Add the action, CONFIG and the options."""
    parser.takes_overrides = True
    parser.add_argument("action", choices=["list", "show"], help="list or show")
    shown = "show: a TOML file, name or run"
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=shown)
    parser.add_argument("--changed", action="store_true", help="show: leave out the defaults")


def run(args: argparse.Namespace) -> int:
    """Print the list or the configuration; return the exit status."""
    if args.action == "list":
        given = [*filter(None, [args.config]), *args.overrides]
        require(not given, "list", given, "nothing behind it")
        print(list_of_configs())
        return 0
    if args.config is None:
        raise ConfigError("CONFIG", "nothing", "a TOML file or a name of `list`")
    folder = Path(args.config)
    if folder.is_dir() and not args.overrides:
        shown, note = read_run(folder)
    else:
        shown, note = read_origins(args.config, args.overrides)
    if args.changed:
        shown = [setting for setting in shown if setting.origin != "default"]
    print(as_toml(shown))
    if note:
        print(note, file=sys.stderr)
    return 0


def list_of_configs() -> str:
    """Return a table of the shipped configurations; ranks are the least that their degrees need."""
    rows = []
    for name, path in shipped_configs().items():
        toml = parse.load_toml(str(path))
        model, training = toml.get("model", {}), toml.get("training", {})
        which = [model.get("name", Model.name), model.get("flavor", Model.flavor)]
        which.append(training.get("dataset", Training.dataset))
        size = [least_ranks(toml.get("parallelism", {})), training.get("steps", "-")]
        told = toml.get("job", {}).get("description", "")
        rows.append([name, *which, *map(str, size), told])
    header = ("name", "model", "flavor", "dataset", "ranks", "steps", "description")
    return text_table(header, rows, left=len(header))


def read_origins(config: str, overrides: Sequence[str]) -> tuple[list[Setting], str]:
    """Read a configuration as a run on this machine would; a note says what does not run here."""
    arguments = [f"--{parse.CONFIG_FILE_KEY}={config}", *overrides]
    built, given = build_job_config(arguments), _set_by(arguments)
    name = built.optimizer.name
    origins = dict.fromkeys(ENTRIES[name].defaults_of(built.model.name), f"{DEFAULT} of {name}")
    files = parse.toml_files(built.job.config_file)
    tables = with_own_rates([*files.values()], name if "optimizer.name" in given else None)
    for (file, values), own in zip(files.items(), tables, strict=True):
        # Rates of another optimizer are in a file, and not among its own.
        origins |= dict.fromkeys(_flat(values), f"{DEFAULT} of {name}")
        origins |= dict.fromkeys(_flat(own), shown_config(file))
    origins |= dict.fromkeys(given, COMMAND_LINE)
    if built.lr_scheduler.warmup_ratio >= 0:
        origins["lr_scheduler.warmup_steps"] = SHARE
    else:  # the file's, if it has one, gave way
        origins.pop("lr_scheduler.warmup_ratio", None)
    try:
        placed = place(read_environment(), arguments)
        built, note = placed.config, placed.note and f"note: {placed.note}"
        origins |= dict.fromkeys(_set_by(placed.arguments[len(arguments) :]), LAUNCHER)
        check_machines(built, placed.environment, placed.device, data="find")
    except ConfigError as error:
        note = f"note: it does not run here: {error}"
    check_model(built, 1, "cpu")
    values = _flat(built.to_dict())
    found = [Setting(key, value, origins.get(key, DEFAULT)) for key, value in values.items()]
    return found + _model_of(built), note


def read_run(folder: Path) -> tuple[list[Setting], str]:
    """Read what a run or a saved step was trained with, and a line about what was changed in it."""
    try:
        if is_complete(folder):
            record = dict(read_step(folder).run)
        else:
            record = read_json(folder / RUN_CONFIG)
    except (DamagedError, OSError, ValueError) as error:
        want = f"the folder of a run, with {RUN_CONFIG}, or of a step, with {STEP_FILE} ({error})"
        raise ConfigError("CONFIG", str(folder), want) from error
    built, usual = build_job_config([], record), _flat(config_class()().to_dict())
    found = []
    for key, value in _flat(built.to_dict()).items():
        found.append(Setting(key, value, DEFAULT if value == usual.get(key) else RUN))
    changes = []
    for entry in record.get(CHANGES, []):
        changes.append(f"after step {entry.pop('after_step')}: {described(entry)}")
    return found + _model_of(built), f"note: changed {'; '.join(changes)}" if changes else ""


def as_toml(settings: Sequence[Setting]) -> str:
    """Format settings as a TOML file with origins; what it cannot say is a comment."""
    lines: list[str] = []
    section = ""
    for setting in settings:
        table, _, name = setting.key.rpartition(".")
        if table != section:
            title = "# the model that these keys give" if setting.origin == MODEL else f"[{table}]"
            lines += ["", title] if lines else [title]
            section = table
        is_comment = setting.value is None or setting.origin in (SHARE, MODEL)
        text = f"{'# ' * is_comment}{name} = {_text(setting.value)}"
        lines.append(text if setting.origin == MODEL else f"{text:<55} # {setting.origin}")
    return "\n".join(lines)


def _model_of(config: Any) -> list[Setting]:
    """Return the arguments of the model that a configuration has, by its flavor and its keys."""
    from torchtitan_lr.titan.base import drop_marker  # late: it imports torchtitan

    args = llama_args(config)  # None for another package's model
    values = {} if args is None else drop_marker(asdict(args))
    return [Setting(f"args.{name}", value, MODEL) for name, value in values.items()]


def _set_by(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of overrides by their keys; ``--a.no_b`` sets ``a.b``."""
    overrides = parse.split_arguments(list(arguments))
    return _flat(parse.typed_overrides(overrides, config_class()))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key; sub-tables follow a table's own keys."""
    found = {prefix + name: value for name, value in table.items() if not isinstance(value, dict)}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
    return found


def _text(value: Any) -> str:
    """Return a value as TOML; None, which is shown in comments only, as JSON."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_text(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
