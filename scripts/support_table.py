# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write what works with what into ``docs/choose.md``, from ``docs/support_matrix.toml``.

The lists stand between the page's two markers.
"""

import sys
from pathlib import Path

from tests.support.support_matrix import SupportMatrix
from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "choose.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def insert(page: Path, text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page's text with the table between its markers."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ConfigError(str(page), f"a page without {begin}", f"the lines {begin} and {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    OneLineParser(description=__doc__).parse_args(argv)
    try:
        PAGE.write_text(insert(PAGE, PAGE.read_text(), SupportMatrix().table()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
