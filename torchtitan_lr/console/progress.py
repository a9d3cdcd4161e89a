# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The progress of long work: a bar on a terminal, a few plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TextIO, TypeVar

from torchtitan_lr.console.lines import duration
from torchtitan_lr.console.log import say
from torchtitan_lr.console.terminal import TERMINAL_VARIABLE, is_terminal

T = TypeVar("T")

QUIET_SECONDS = 10.0
"""Time before the first plain line, and the shortest time between two."""

BAR_DELAY = 1.0
"""Time before a bar appears: short work needs none, and lines of the ranks arrive 0.1 s late."""


def progress(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    unit: str = "batches",
    shown: bool = True,
) -> Iterator[T]:
    """Yield ``items`` and show how many are done.

    A rank of the launcher draws its bar on the launcher's terminal, a command on its own. Without
    a terminal there is a plain line after `QUIET_SECONDS`, and then at growing intervals.

    Args:
        items: What to work through.
        what: The work, such as ``validation``.
        total: Number of items, None if unknown.
        unit: Name of the items.
        shown: Whether to show anything; only one rank should.
    """
    if not shown:
        yield from items
        return
    with ExitStack() as stack:
        terminal = _terminal(stack)
        if terminal is None:
            yield from _plain(items, Plain(what, total, unit))
        else:
            yield from _bar(items, terminal, desc=what, total=total, unit=f" {unit}")


class Plain:
    """Plain lines of progress, at growing intervals.

    Args:
        what: The work.
        total: Number of items, None if unknown.
        unit: Name of the items.
        clock: Returns seconds.
        write: Prints a line.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = say,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._clock, self._write = clock, write
        self._started = clock()
        self._due = self._started + QUIET_SECONDS

    def done(self, count: int) -> None:
        """Print a line if one is due."""
        now = self._clock()
        if now < self._due or count == self._total:
            return
        elapsed = now - self._started
        # A quarter of the time so far: an hour of work has about 20 lines.
        self._due = now + max(QUIET_SECONDS, elapsed / 4)
        if self._total is None:
            self._write(f"{self._what}: {count:,} {self._unit} in {duration(elapsed)}")
            return
        left = duration(elapsed * (self._total / count - 1))
        self._write(
            f"{self._what}: {count:,} of {self._total:,} {self._unit} "
            f"({count / self._total:.0%}), {left} left"
        )


def _plain(items: Iterable[T], lines: Plain) -> Iterator[T]:
    for count, item in enumerate(items, 1):
        yield item
        lines.done(count)


def _bar(items: Iterable[T], terminal: TextIO, **options: Any) -> Iterator[T]:
    from tqdm import tqdm  # imported late: most commands show no bar

    class Bar(tqdm):
        monitor_interval = 0  # no thread beside training

    yield from Bar(
        items, file=terminal, leave=False, delay=BAR_DELAY, ncols=_columns(terminal), **options
    )


def _columns(terminal: TextIO) -> int:
    """Return the width of a bar; a terminal without a size has 80 columns."""
    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return min(columns or 80, 100)


def _terminal(stack: ExitStack) -> TextIO | None:
    """Return the terminal for a bar: this process's, or its launcher's; None without one."""
    if os.environ.get("TERM") == "dumb":
        return None
    if is_terminal(sys.stderr):
        return sys.stderr
    path = os.environ.get(TERMINAL_VARIABLE)
    if not path:
        return None
    try:
        # Not the controlling terminal: Ctrl-C is sent to the launcher only.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w")
    except OSError:
        return None
    return stack.enter_context(file)
