#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write the table of the README's section "Results" from ``docs/results.md`` and ``docs/results/``.

Each cell of `ROWS` names its figures as ``{section/row/column}``, or ``{page: section/row/column}``
for a page of ``docs/results``. ``--print`` only prints the table.
"""

import argparse
import re
import sys
from pathlib import Path

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.cli import OneLineParser, in_one_line, markdown_table

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
PAGES = ROOT / "docs" / "results"

HEADER = ("method", "measured", "compared with")
ROWS = (
    (
        "BTP 60M, T = 4",
        "{Plans side by side/BTP/s per step} s, {Plans side by side/BTP/MB per step} MB/step",
        "vanilla {Plans side by side/vanilla/s per step} s, "
        "{Plans side by side/vanilla/MB per step} MB; "
        "full {Plans side by side/full rank/s per step} s, "
        "{Plans side by side/full rank/MB per step} MB",
    ),
    (
        "BTP, T = 2, loss after 2,000 steps",
        "{btp_loss: Losses/BTP/minus one-process [95%]} nats",
        "one process {btp_loss: Losses/one-process/validation loss}",
    ),
    (
        "TSR-Adam, 200 Mbit/s",
        "{TSR-Adam over a slow link/TSR-Adam/s per step} s per step",
        "AdamW {TSR-Adam over a slow link/AdamW/s per step} s",
    ),
    (
        "TSR-Adam, loss after 1,000 steps",
        "{optimizers: Losses/TSR-keep long/validation loss}, "
        "{optimizers: Losses/TSR-keep long/MB sent} MB sent",
        "AdamW {optimizers: Losses/AdamW long/validation loss}, "
        "{optimizers: Losses/AdamW long/MB sent} MB",
    ),
    (
        "TAGC sketch 10×, 200 Mbit/s",
        "{TAGC over a slow link/sketch/s per step} s, "
        "{TAGC over a slow link/sketch/MB per step} MB per step",
        "FSDP2 {TAGC over a slow link/FSDP2/s per step} s, "
        "{TAGC over a slow link/FSDP2/MB per step} MB",
    ),
    (
        "TAGC sketch 10×, loss",
        "{tagc: Losses/sketch-10x/minus dense [95%]}",
        "dense {tagc: Losses/dense/validation loss}",
    ),
    (
        "CAAT-Net, p = 0.5, 8 lanes, loss",
        "{caat: Losses/8-lanes-p0.5/minus p1 [95%]}",
        "p = 1: {caat: Losses/p1/validation loss}",
    ),
    (
        "CoLA, equal FLOPs, d = 48, loss",
        "{families: Losses/cola s1/minus full [95%]}",
        "full rank {families: Losses/full s1/validation loss}",
    ),
    (
        "CoLA, half the FLOPs, d = 48, loss",
        "{families: Half the compute/cola s1/minus full at twice the FLOPs [95%]}",
        "full rank {families: Losses/full s1/validation loss}",
    ),
    (
        "CoLA, r = d/8, equal FLOPs, loss",
        "{rank: Losses/r8/minus r16 [95%]}",
        "r = d/4: {rank: Losses/r16/validation loss}",
    ),
)


def read_figures(text: str) -> dict[str, str]:
    """Read the tables of a page.

    Args:
        text: Markdown. Of the tables of a section of level 2, the first one counts.

    Returns:
        Cells by ``section/row/column``; a row's name is its first cell, or its first two where
        that one is not enough. Of several rows of a name, the first cell alone means the first one
        and two cells the last one: with budgets, the largest.
    """
    figures: dict[str, str] = {}
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        table = re.search(r"(?m)^(\|.*\n)+", section + "\n")
        rows = table[0].splitlines() if table else []
        lines = [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]
        for row in lines[2:]:
            for column, cell in zip(lines[0][1:], row[1:], strict=True):
                figures.setdefault(f"{title}/{row[0]}/{column}", cell)
                figures[f"{title}/{' '.join(row[:2])}/{column}"] = cell
    return figures


def read_pages() -> dict[str, str]:
    """Read the tables of all pages; those of ``docs/results`` are named ``page: section/...``."""
    figures = read_figures(PAGE.read_text())
    for page in sorted(PAGES.glob("*.md")):
        own = read_figures(page.read_text())
        figures |= {f"{page.stem}: {name}": cell for name, cell in own.items()}
    return figures


def results_table(figures: dict[str, str]) -> str:
    """Fill in `ROWS`.

    Args:
        figures: Returned by `read_figures`.

    Raises:
        ConfigError: The page has no such figure.
    """

    def figure(match: re.Match[str]) -> str:
        if match[1] not in figures:
            raise ConfigError(PAGE.name, match[1], "a cell of one of its tables")
        return figures[match[1]]

    return markdown_table(
        HEADER, [[re.sub("{(.*?)}", figure, cell) for cell in row] for row in ROWS]
    )


def insert(text: str, table: str) -> str:
    """Return the README's text with the table of its section "Results" replaced."""
    before, heading, rest = text.partition("## Results\n")
    return before + heading + re.sub(r"(?m)(^\|.*\n)+", lambda _: table + "\n", rest, count=1)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print it, change nothing")
    return parser.parse_args(argv)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    arguments = parse_args(argv)
    table = results_table(read_pages())
    if arguments.print:
        print(table)
    else:
        README.write_text(insert(README.read_text(), table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
