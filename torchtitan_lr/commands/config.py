# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the shipped configurations, or show what a run would use and where each key comes from.

    torchtitan-lr config list
    torchtitan-lr config show debug_cola
    torchtitan-lr config show my.toml --training.steps=100 --changed
    torchtitan-lr config show outputs/checkpoint/step-100

CONFIG is a TOML file or the name of a shipped one; --section.key=value overrides it, as in a run.
Of the folder of a run or of a step it is what that was trained with.
The output of `show` is a TOML file. Behind each key is its origin:

    default         of this package or of torchtitan; "default of Muon": of that optimizer, also
                    where a file sets the rate of another one
    a TOML file     the one that sets it: CONFIG, or a file that it includes
    command line    an override
    warmup_ratio    warm-up, a share of the steps
    launcher        changed to fit the ranks: NGPU, or the GPUs of this machine

The model that model.flavor and the keys give stands below, as comments. A configuration that
cannot run here is shown too, with the reason on stderr; its corpus is not read.

Exit status: 0, or 2 for an invalid configuration.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, check_toml
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import shipped_configs
from torchtitan_lr.config.schema import Model, Training, least_ranks
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError, require


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
        print(list_as_text(list_configs()))
        return 0
    if args.config is None:
        raise ConfigError("CONFIG", "nothing", "a TOML file or a name of `list`")
    from torchtitan_lr.commands.origins import as_toml, read_origins, read_run

    folder = Path(args.config)
    if folder.is_dir() and not args.overrides:
        shown, note = read_run(folder)
    else:
        check_toml(args.config)
        shown, note = read_origins(args.config, args.overrides)
    if args.changed:
        shown = [setting for setting in shown if setting.origin != "default"]
    print(as_toml(shown))
    if note:
        print(note, file=sys.stderr)
    return 0


def list_configs() -> list[dict[str, Any]]:
    """Return one row per shipped configuration; ranks are the least that its degrees need."""
    rows = []
    for name, path in shipped_configs().items():
        toml = load_toml(str(path))
        model, training = toml.get("model", {}), toml.get("training", {})
        rows.append(
            {
                "name": name,
                "model": model.get("name", Model.name),
                "flavor": model.get("flavor", Model.flavor),
                "dataset": training.get("dataset", Training.dataset),
                "ranks": least_ranks(toml.get("parallelism", {})),
                "steps": training.get("steps"),
                "description": toml.get("job", {}).get("description", ""),
            }
        )
    return rows


def list_as_text(rows: list[dict[str, Any]]) -> str:
    """Format the rows of `list_configs` as a table."""
    header = ("name", "model", "flavor", "dataset", "ranks", "steps", "description")
    lines = [["-" if row[key] is None else str(row[key]) for key in header] for row in rows]
    return text_table(header, lines, left=len(header))
