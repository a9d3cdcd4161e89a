# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The progress of long work: a bar on a command's terminal, a few plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torchtitan_lr.console.log import duration, say

T = TypeVar("T")

QUIET_SECONDS = 10.0  # time before the first plain line, and the shortest time between two
BAR_DELAY = 1.0  # time before a bar appears: short work needs none


def progress(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    unit: str = "batches",
    shown: bool = True,
) -> Iterator[T]:
    """Yield ``items`` and show how many are done: by a bar, or plain lines without a terminal."""
    if not shown:
        yield from items
    elif sys.stderr.isatty():
        from tqdm import tqdm  # imported late: most commands show no bar

        yield from tqdm(items, what, total, leave=False, unit=f" {unit}", delay=BAR_DELAY)
    else:
        lines = Plain(what, total, unit)
        for count, item in enumerate(items, 1):
            yield item
            lines.done(count)


class Plain:
    """Plain lines of progress, at growing intervals."""

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


class Preparing:
    """The progress of a preparation: documents, tokens, tokens per second and the time left."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, write: Callable[[str], None] = say
    ) -> None:
        self._clock, self._write = clock, write
        self._started = self._due = clock()
        self._before: tuple[int, float] | None = None
        self._terminal = sys.stderr.isatty()
        self._due += 0.0 if self._terminal else QUIET_SECONDS

    def __call__(self, documents: int, tokens: int, share: float | None) -> None:
        """Show the state if it is time to."""
        now = self._clock()
        # The first piece is the start: what was done before it took no time here.
        self._before = self._before or (tokens, share or 0.0)
        if now < self._due:
            return
        elapsed = max(now - self._started, 1e-9)
        rate = (tokens - self._before[0]) / elapsed
        text = f"preparing: {documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s"
        if share is not None:
            share = min(share, 1.0)  # an estimate from the sizes of files may be too small
            new = share - self._before[1]
            left = f", {duration(elapsed * (1 - share) / new)} left" if new > 0 else ""
            text += f", {share:.0%}{left}"
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._due = now + 0.2
        else:
            self._write(text)
            self._due = now + max(QUIET_SECONDS, elapsed / 4)

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
