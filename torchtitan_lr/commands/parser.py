# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Argument parsing, errors and tables of all command lines in scripts/.

The checkpoint or the TOML file is the first argument, ``--section.key=value`` overrides the TOML,
``--out`` is the output path, ``--json`` prints data instead of a table. ``--help`` shows every
default. An error is one line, ``error: ...``, with status 2.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lr.config.shipped import find_config, near_configs
from torchtitan_lr.errors import ConfigError, RunFailedError


def in_one_line(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Decorate a program's main function to print errors in one line and return a status.

    Args:
        main: Takes the arguments, or None for the process's own.

    Returns:
        A function that returns 2 for a `ConfigError`, and 1 for a `RunFailedError` or a closed
        output.
    """

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            status = main(argv)
            sys.stdout.flush()
            return status
        except ConfigError as error:
            _wait_for_first_rank()
            print(f"error: {error}", file=sys.stderr)
            return 2
        except RunFailedError as error:
            print(error, file=sys.stderr)
            return 1
        except BrokenPipeError:  # the reader, `head` for example, has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1

    return wrapped


FIRST_RANK_SECONDS = 5
"""Time that the first rank of torchrun has to report an error that all ranks found."""


def _wait_for_first_rank() -> None:
    """On any other rank, wait: torchrun ends this process once the first rank has failed."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        time.sleep(FIRST_RANK_SECONDS)


def last_error(output: str, status: int) -> str:
    """Return the last error line of a program.

    Args:
        output: What it printed.
        status: Its exit status.

    Returns:
        The last line that begins with ``error: ``, else the last line, else the status in words.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"it ended with status {status}"])[-1]


@dataclass
class ShownNames:
    """The names that the help of a program shows.

    Args:
        program: The program's name; empty for that of its file.
        texts: Texts of descriptions, with what is shown in their place.
    """

    program: str = ""
    texts: dict[str, str] = field(default_factory=dict)


SHOWN = ShownNames()
"""The names of this process; `show_names` sets them."""


def show_names(program: str, texts: dict[str, str]) -> None:
    """Set the names that the help of a program shows, as ``torchtitan-lr`` does.

    Args:
        program: The program's name.
        texts: Texts of descriptions, with what is shown in their place.
    """
    SHOWN.program, SHOWN.texts = program, texts


class _DeclaredError(BaseException):
    """A parser has all its arguments; `declared_parser` catches it."""

    def __init__(self, parser: "OneLineParser") -> None:
        self.parser = parser


class OneLineParser(argparse.ArgumentParser):
    """A parser whose help shows every default and whose errors are one line with status 2.

    Args:
        **options: Options of `argparse.ArgumentParser`; a description keeps its line breaks.

    Attributes:
        arguments: The arguments that `add_argument` added, without those of groups.
        takes_overrides: Whether `parse_with_overrides` parsed.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if SHOWN.program:
            options.setdefault("prog", SHOWN.program)
        for text, shown in SHOWN.texts.items():
            if options.get("description"):
                options["description"] = options["description"].replace(text, shown)
        self.takes_overrides = False
        self.arguments: list[argparse.Action] = []
        self._first: list[str] = []
        super().__init__(**options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument as in `argparse`; its help ends with the default, if any.

        Args:
            *names: Names of the argument.
            **options: Options of `argparse.ArgumentParser.add_argument`.

        Returns:
            The action that `argparse` created.
        """
        default, text = options.get("default"), options.get("help") or ""
        empty = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        if not empty and text is not argparse.SUPPRESS and "default" not in text:
            shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
            options["help"] = f"{text} (default: {shown.replace('%', '%%')})".lstrip()
        self.arguments.append(super().add_argument(*names, **options))
        return self.arguments[-1]

    def add_first(self, name: str, old: str, **options: Any) -> None:
        """Add the first positional argument, which an old option may replace.

        Args:
            name: Name of the argument and of the attribute.
            old: The old option, such as ``--config``; hidden in the help.
            **options: Options of `add_argument`; without a default the argument is required.
        """
        self.add_argument(name, metavar=name.upper(), nargs="?", **options)
        self.add_argument(old, dest=f"old_{name}", type=options.get("type"), help=argparse.SUPPRESS)
        self._first.append(name)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the known arguments, as in `argparse`; ``parse_args`` calls this too.

        Args:
            args: The arguments; None for the process's own.
            namespace: The namespace to fill; None for a new one.

        Returns:
            The attributes, and the unknown arguments.
        """
        if _declaring:
            raise _DeclaredError(self)
        options, rest = super().parse_known_args(args, namespace)
        for name in self._first:
            given = vars(options).pop(f"old_{name}")
            if given is not None:
                setattr(options, name, given)
            if getattr(options, name) is None:
                self.error(f"{name.upper()}: got nothing, expected it as the first argument")
        return options, rest

    def parse_with_overrides(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line that may contain overrides of the TOML.

        Args:
            argv: The arguments; None for the process's own.

        Returns:
            The attributes, with the overrides as ``overrides``.
        """
        self.takes_overrides = True
        options, overrides = self.parse_known_args(argv)
        self.check_overrides(overrides)
        options.overrides = overrides
        return options

    def error(self, message: str) -> NoReturn:
        """Print ``error: ...`` to stderr and exit with status 2.

        Args:
            message: The error message.
        """
        _wait_for_first_rank()
        self.exit(2, f"error: {message}\n")

    def check_at_least(self, options: argparse.Namespace, **minima: float) -> None:
        """Exit with an error for options below their minimum.

        Args:
            options: Returned by `parse_args`.
            **minima: The smallest allowed value of each option.
        """
        for name, minimum in minima.items():
            if not getattr(options, name) >= minimum:
                got = getattr(options, name)
                self.error(f"--{name}: got {got}, expected at least {minimum}")

    def check_toml(self, path: str, name: str = "--config") -> None:
        """Exit with an error if a configuration file does not exist.

        Args:
            path: The file, or the name of a shipped one.
            name: Name of the argument in the message.
        """
        if not Path(find_config(path)).is_file():
            near = near_configs(path)
            hint = f": did you mean {near}?" if near else ""
            self.error(f"{name}: got {path!r}, expected a TOML file{hint}")

    def check_overrides(self, arguments: Sequence[str]) -> None:
        """Exit with an error for unknown arguments that are not overrides of the TOML.

        Args:
            arguments: The unknown arguments from `parse_known_args`.
        """
        for argument in arguments:
            if not (argument.startswith("--") and "." in argument.partition("=")[0]):
                self.error(f"got {argument!r}, expected --section.key=value or an option of --help")


_declaring: list[Callable[..., int]] = []


def declared_parser(main: Callable[[list[str] | None], int]) -> OneLineParser:
    """Return the parser that a command's main function declares, without running the command.

    Args:
        main: The main function, which parses its arguments before it does anything else.

    Raises:
        ValueError: The function parses nothing with a `OneLineParser`.
    """
    _declaring.append(main)
    try:
        main([])
    except _DeclaredError as declared:
        return declared.parser
    finally:
        _declaring.pop()
    raise ValueError(f"{main} has no OneLineParser")


def overrides_of(items: Sequence[str]) -> list[str]:
    """Turn ``section.key=value`` items into arguments of a training run."""
    return [f"--{item}" for item in items]


def new_folder(out: str) -> Path:
    """Return the path of ``--out``, a folder that is yet to be made.

    Args:
        out: Value of the option.

    Raises:
        ConfigError: The folder exists.
    """
    folder = Path(out)
    if folder.exists():
        raise ConfigError("--out", out, "a folder without earlier results")
    return folder
