# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the commands in scripts/ share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, as all refusals are told, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message to stderr and exit.

        Args:
            message: What argparse has to say.
        """
        self.exit(2, f"{self.prog}: {message}\n")

    def check_at_least(self, options: argparse.Namespace, **minima: float) -> None:
        """Refuse options below their minimum.

        Args:
            options: What `parse_args` returned.
            **minima: The smallest value of each option that works.
        """
        for name, minimum in minima.items():
            if not getattr(options, name) >= minimum:
                got = getattr(options, name)
                self.error(f"--{name}: got {got}, expected at least {minimum}")

    def check_toml(self, path: str, name: str = "--config") -> None:
        """Refuse a configuration file that is not there.

        Args:
            path: The file.
            name: What the argument is called.
        """
        if not Path(path).is_file():
            self.error(f"{name}: got {path!r}, expected a TOML file")

    def check_overrides(self, arguments: Sequence[str]) -> None:
        """Refuse arguments that are neither this command's nor overrides of the TOML.

        Args:
            arguments: What `parse_known_args` did not know.
        """
        for argument in arguments:
            if not (argument.startswith("--") and "." in argument.partition("=")[0]):
                self.error(f"got {argument!r}, expected --section.key=value or an option of --help")


def overrides_of(items: Sequence[str]) -> list[str]:
    """Turn ``section.key=value`` items into arguments of a training run."""
    return [f"--{item}" for item in items]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay cells out as a Markdown table, without a newline at its end.

    Args:
        header: Names of the columns.
        rows: As many cells each.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay cells out in columns for a terminal.

    Args:
        header: Names of the columns.
        rows: As many cells each.
        left: How many columns are aligned to the left; the others are numbers.
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
