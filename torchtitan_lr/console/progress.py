# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The progress of long work: a bar on a command's terminal, a plain line per minute elsewhere."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torchtitan_lr.console.log import say

T = TypeVar("T")

BAR_DELAY = 1.0  # seconds before a bar appears: short work needs none
LINE_SECONDS = 60.0  # before the first plain line, and between two


def progress(
    items: Iterable[T], what: str, total: int | None = None, unit: str = "batches"
) -> Iterator[T]:
    """Yield ``items`` and show how many are done."""
    with counting(what, total, unit) as done:
        for item in items:
            yield item
            done(1)


@contextmanager
def counting(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
    """Show how many of ``total`` units are done, by what is called with the numbers of new ones."""
    from tqdm import tqdm  # imported late: most commands show no progress

    how: dict[str, Any] = {"delay": BAR_DELAY}
    if not sys.stderr.isatty():
        how = dict.fromkeys(("delay", "mininterval", "maxinterval"), LINE_SECONDS)
        how |= {"miniters": 1, "ncols": 0, "file": _Lines()}
    tqdm.set_lock(threading.RLock())  # tqdm's own is one of processes, and starts one
    with tqdm(None, what, total, False, unit=f" {unit}", unit_scale=True, **how) as bar:
        yield bar.update


class _Lines:
    """A file in which each drawing of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            say(line)
