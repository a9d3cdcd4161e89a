# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The lines of a rank: where they go, and the texts of times.

The console has few, and warnings about which a user can do something. All records are written to
``details.log`` beside the rank's output; ``metrics.verbose`` shows them.
"""

import contextlib
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

from torchtitan_lr.errors import escaped

console = logging.getLogger("torchtitan_lr.console")
"""Logger of the lines that the console always shows."""

DETAILS_FILE = "details.log"

_DETAILS_FORMAT = "%(asctime)s %(levelname)s %(name)s %(module)s:%(lineno)d %(message)s"
_CONSOLE_FORMAT = "%(asctime)s %(level)s%(message)s"  # the level before warnings and errors

# Warnings of torchtitan 0.2.2 about which a user can do nothing.
_NOT_ACTIONABLE = (
    "ENV[",  # variables that torchrun or torch has set, replaced as configured
    "Error running lspci",  # the device's name is known without it
    "Detected that the pytorch",
    "DataLoader state is empty",  # a checkpoint of another number of ranks, which can be resumed
    "Setting validation steps to -1",  # this package's validation sets have equal lengths
)


class _OfTheConsole(logging.Filter):
    """Passes the console's own records, and warnings about which a user can do something."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == console.name:
            return True
        if record.levelno < logging.WARNING or record.name == "py.warnings":
            return False
        return not record.getMessage().startswith(_NOT_ACTIONABLE)


class _Escaping(logging.Formatter):
    """Escapes control characters: names and texts of a record may be a stranger's."""

    def format(self, record: logging.LogRecord) -> str:
        record.level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return escaped(super().format(record), keep="\n\t")


if logging.lastResort is not None:  # prints the warnings of a process that sets up no log
    logging.lastResort.setFormatter(_Escaping())


class _Lines(logging.StreamHandler):
    """A rank's handler for the console."""


class _DetailsHandler(logging.FileHandler):
    """Ignores errors: a full disk must not add lines to the console, or end a run."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record if possible."""
        with contextlib.suppress(OSError):  # of opening the file
            super().emit(record)


def init_console(verbose: bool = False) -> None:
    """Set up the log of this process; a second call replaces the first."""
    logging.raiseExceptions = False  # an error of a handler has no lines of its own
    console.setLevel(logging.INFO)
    lines, details = _Lines(sys.stdout), _Escaping(_DETAILS_FORMAT, "%Y-%m-%d %H:%M:%S")
    lines.setFormatter(details if verbose else _Escaping(_CONSOLE_FORMAT, "%H:%M:%S"))
    if not verbose:
        lines.addFilter(_OfTheConsole())
    handlers: list[logging.Handler] = [lines]
    # Torchrun has a folder of this rank's output.
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if error_file.name and error_file.parent.is_dir():
        file = _DetailsHandler(error_file.with_name(DETAILS_FILE), delay=True)
        file.setFormatter(details)
        handlers.append(file)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # torch's profiler prints its own lines otherwise.
    os.environ["KINETO_LOG_LEVEL"] = "5"


def say(message: str) -> None:
    """Print a line: in a rank to its log, in a command to stderr, if that is still read."""
    if any(isinstance(handler, _Lines) for handler in logging.getLogger().handlers):
        console.info(message)
        return
    with contextlib.suppress(OSError, RuntimeError):  # a signal came while a line was printed
        print(escaped(message, keep="\n\t"), file=sys.stderr, flush=True)


class Pace:
    """The time that a run still needs, from its mean pace since its first logged step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def left(self, step: int, now: float) -> float | None:
        """Return the seconds left after a logged step; None at the first one."""
        since, started = self._first = self._first or (step, now)
        if step == since:
            return None
        return (now - started) / (step - since) * max(0, self._steps - step)


def duration(seconds: float) -> str:
    """Return a time as ``h:mm:ss``, with days before it if there are any."""
    return str(timedelta(seconds=round(seconds)))
