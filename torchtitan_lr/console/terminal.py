# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What commands show: tables, and the progress of long work."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torchtitan_lr.console.log import say
from torchtitan_lr.errors import escaped

T = TypeVar("T")

BAR_DELAY = 1.0  # seconds before a bar appears: short work needs none
LINE_SECONDS = 60.0  # before the first plain line, and between two


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format cells as Markdown without padding: one new cell then changes one line."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(escaped, cells))} |" for cells in lines)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format cells in aligned columns for a terminal."""
    lines = [[escaped(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:left], widths, strict=False)]
        for cell, width in zip(line[left:], widths[left:], strict=True):
            cells.append(cell.rjust(width))
        aligned.append("  ".join(cells).rstrip())
    return "\n".join(aligned)


def named_values(values: Mapping[str, Any]) -> str:
    """Format values by name, one per line; those that are None are left out."""
    lines = []
    for name, value in values.items():
        if value is not None:
            text = f"{value:,.4f}" if isinstance(value, float) else str(value)
            lines.append(f"{name.replace('_', ' '):<21}{escaped(text)}")
    return "\n".join(lines)


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
