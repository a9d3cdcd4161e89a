# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The progress of long work: a bar on a command's terminal, a few plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torchtitan_lr.console.log import duration, say

T = TypeVar("T")

QUIET_SECONDS = 10.0
"""Time before the first plain line, and the shortest time between two."""

BAR_DELAY = 1.0
"""Time before a bar appears: short work needs none."""


def progress(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    unit: str = "batches",
    shown: bool = True,
) -> Iterator[T]:
    """Yield ``items`` and show how many are done; of several ranks one should.

    Without a terminal, as in a rank of the launcher, there is a plain line after `QUIET_SECONDS`,
    and then at growing intervals.
    """
    if not shown:
        yield from items
        return
    with counting(what, total, unit) as done:
        for item in items:
            yield item
            done(1)


@contextmanager
def counting(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
    """Show how many of ``total`` units are done, by what is called with the numbers of new ones."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # imported late: most commands show no bar

        options = {"leave": False, "unit": f" {unit}", "unit_scale": True, "delay": BAR_DELAY}
        with tqdm(None, what, total, **options) as bar:
            yield bar.update
        return
    lines, count = Plain(what, total, unit), 0

    def done(new: int) -> None:
        nonlocal count
        count += new
        lines.done(count)

    yield done


class Plain:
    """Plain lines of progress, at growing intervals; items may be more than the ``total``."""

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
        if not self._total:
            self._write(f"{self._what}: {count:,} {self._unit} in {duration(elapsed)}")
            return
        left = duration(elapsed * max(0.0, self._total / count - 1))
        self._write(
            f"{self._what}: {count:,} of {self._total:,} {self._unit} "
            f"({min(count / self._total, 1):.0%}), {left} left"
        )
