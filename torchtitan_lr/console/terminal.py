# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Terminals: whether a stream is one, and colours on it.

Ranks write into files, which torchrun copies to the launcher's output. Therefore a rank never
writes colours: torchrun's process adds them if its output is a terminal (:class:`ColoredStream`).
"""

import os
import re
import sys
from typing import Any, TextIO

TERMINAL_VARIABLE = "TORCHTITAN_LR_TERMINAL"
"""Environment variable of the ranks: the device file of the launcher's terminal, if it has one."""

_RESET = "\x1b[0m"
_COLORS = (
    (re.compile(r"\bstep +\d+/\d+"), "\x1b[1m"),
    (re.compile(r"(?<=\bloss )\S+"), "\x1b[32m"),
    (re.compile(r"(?<=\bgrad norm )\S+"), "\x1b[33m"),
    (re.compile(r"\S+(?= tokens/s)"), "\x1b[34m"),
    (re.compile(r"\bwarning:"), "\x1b[33m"),
    (re.compile(r"\berror:"), "\x1b[31m"),
    (re.compile(r"^\[rank\d+\]:"), "\x1b[2m"),
)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is an open terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None without a console, or closed
        return False


def wants_color(stream: Any) -> bool:
    """Return whether to write colours to a stream; ``NO_COLOR`` and ``TERM=dumb`` forbid them."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and is_terminal(stream)


def shared_terminal() -> str:
    """Return the device file of this process's terminal, for the bars of its ranks.

    Returns:
        Such as ``/dev/pts/3``; empty if the output or the errors go elsewhere.
    """
    if not (is_terminal(sys.stdout) and is_terminal(sys.stderr)):
        return ""
    try:
        return os.ttyname(sys.stderr.fileno())
    except OSError:  # a terminal without a name in this container
        return ""


def colored(line: str) -> str:
    """Return a line of the console with the colours of its parts."""
    for pattern, color in _COLORS:
        line = pattern.sub(rf"{color}\g<0>{_RESET}", line)
    return line


class ColoredStream:
    """A terminal that colours the lines written to it.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a whole line with colours."""
        return self._stream.write(colored(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
