# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tables as text: Markdown, aligned columns for a terminal, and values by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_lr.errors import escaped


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
