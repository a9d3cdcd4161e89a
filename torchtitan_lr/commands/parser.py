# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Argument parsing and errors of all subcommands.

The checkpoint or the TOML file is the first argument, ``--section.key=value`` overrides the TOML,
OUT or ``--out`` is the output path, ``--json`` prints data. ``--help`` shows every default. An
error is one line, ``error: ...``, with status 2.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lr.checkpoints.folders import is_free
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError, describe_error, escaped, require


def in_one_line(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Decorate a main function to print errors in one line and return a status.

    It is 2 for a `ConfigError`; 1 for a failed run, a closed output or an error of the system.
    """

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            status = main(argv)
            sys.stdout.flush()
            return status
        except Exception as error:
            _flush_output()
            if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has what it wants
                return 1
            refused = isinstance(error, ConfigError)
            line = f"error: {error}" if refused else describe_error(error)
            if line is None:
                raise
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(escaped(line), file=sys.stderr, flush=True)
            return 2 if refused else 1

    return wrapped


def _flush_output() -> None:
    """Write what stdout still holds, or drop it: its last flush would fail at the process's end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _path(text: str) -> Path:
    """Return the path of an argument, expanded as those of a configuration are."""
    try:
        return user_path(text, "")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"got {error.got!r}, expected {error.want}") from error


SHARED: dict[str, dict[str, Any]] = {
    "config": {"metavar": "CONFIG", "help": "a TOML file, or a shipped name"},
    "checkpoint": {
        "metavar": "CHECKPOINT",
        "type": Path,
        "help": "a run's folder (its newest step), .../checkpoint/step-100, or an export",
    },
    "out": {"metavar": "OUT", "type": Path, "help": "a new or empty folder"},
    "--text_column": {"default": "text", "help": "key of the text in .jsonl, .parquet and the Hub"},
    "--device": {"default": "", "help": "default: cuda where there is one, else cpu"},
    "--experimental.custom_import": {
        "dest": "custom_import",
        "metavar": "MODULE",
        "help": "a module of your own that registers the model's family or plan; what a run's "
        "record names is never imported",
    },
    "--json": {"action": "store_true", "help": "print JSON instead"},
}
"""Arguments of several commands."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose help shows every default and whose errors are one line with status 2."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        self.takes_overrides = False  # of --section.key=value, as the attribute `overrides`
        self.takes_all = False  # of all arguments but --help, as they are
        super().__init__(**options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument as in `argparse`; its help ends with the default, if any."""
        if options.get("type") is Path:
            options["type"] = _path
        default, text = options.get("default"), options.get("help", "")
        empty = default is False or default in (None, "", [], argparse.SUPPRESS)
        if not empty and text is not argparse.SUPPRESS and "default" not in text:
            options["help"] = f"{text} (default: {default})"
        return super().add_argument(*names, **options)

    def add_shared(self, *names: str) -> None:
        """Add some of `SHARED`."""
        for name in names:
            self.add_argument(name, **SHARED[name])

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line, with overrides of the TOML if `takes_overrides`."""
        given = sys.argv[1:] if args is None else list(args)
        if self.takes_all and not {"-h", "--help"} & {*given}:
            return argparse.Namespace(arguments=given)
        options, rest = super().parse_known_args(given, namespace)
        if self.takes_overrides:
            options.overrides = rest
        for argument in rest:
            override = argument.startswith("--") and "." in argument.partition("=")[0]
            if not (self.takes_overrides and override):
                want = "--section.key=value or an option" if self.takes_overrides else "an option"
                self.error(f"got {argument!r}, expected {want} of --help")
        return options

    def error(self, message: str) -> NoReturn:
        """Print ``error: ...`` to stderr and exit with status 2."""
        self.exit(2, f"error: {escaped(message)}\n")


def check_out(out: Path, key: str) -> None:
    """Refuse an output folder that holds something."""
    require(is_free(out), key, str(out), "a folder that is empty or new")


def check_at_least(args: argparse.Namespace, **minima: float) -> None:
    """Refuse options below their minimum."""
    for name, minimum in minima.items():
        if not getattr(args, name) >= minimum:
            raise ConfigError(f"--{name}", getattr(args, name), f"at least {minimum}")
