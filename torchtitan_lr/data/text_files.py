# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Lines of plain and compressed text files, and which part of a file they belong to.

A plain file is cut into byte ranges, each read from its own start. A compressed file can only be
read from its beginning, so its parts are interleaved: runs of 16 KiB of text go to the parts in
turn, and whoever reads a part decompresses the whole file. Many files of some 100 MB are better
than one of many GB; the token cache spares the second pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffixes of compressed files, with pyarrow's names of the codecs."""

PIECE_BYTES = 1 << 12
"""Bytes of a text file whose lines belong to one split."""

RUN_PIECES = 4
"""Neighbouring pieces that belong to one part of a compressed file."""

MOST_PARTS = 32
"""Parts of a compressed file at most; reading all of them decompresses the file that often."""

Line = tuple[int, bytes]
"""A line's byte offset in the text, and the line."""

_CHUNK = 1 << 20


def kind_of(path: Path) -> str:
    """Return a file's suffix without that of its compression: .jsonl of ``a.jsonl.zst``."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def is_compressed(path: Path) -> bool:
    """Return whether a file's text can only be read from its beginning."""
    return path.suffix in COMPRESSED


def open_text(path: Path) -> Any:
    """Open a file's text for reading bytes, decompressed where it is compressed.

    Raises:
        OSError: It cannot be read, or (on reading) it is damaged.
    """
    if not is_compressed(path):
        return path.open("rb")
    import pyarrow as pa  # imported late: plain text does not need it

    return pa.input_stream(str(path), compression=COMPRESSED[path.suffix])


def piece_of(line: Line) -> int:
    """Return the index of a line's piece of :data:`PIECE_BYTES`."""
    return line[0] // PIECE_BYTES


def run_of(line: Line) -> int:
    """Return the index of a line's run of :data:`RUN_PIECES` pieces."""
    return piece_of(line) // RUN_PIECES


def lines_of(path: Path, size: int, part: int, count: int) -> Iterator[Line]:
    """Yield the lines of a part of a file.

    Args:
        path: The file.
        size: Its bytes on disk.
        part: The part, from 0.
        count: Number of parts.

    Yields:
        Each line with its offset. All parts together have each line once.
    """
    if is_compressed(path):
        return (line for line in _all_lines(path) if run_of(line) % count == part)
    return _lines(path, part * size // count, (part + 1) * size // count)


def line_number(path: Path, start: int) -> int:
    """Return the line number at an offset; this reads the file, and only error messages use it."""
    number, left = 1, start
    with open_text(path) as file:
        while left and (chunk := file.read(min(left, _CHUNK))):
            number += chunk.count(b"\n")
            left -= len(chunk)
    return number


def _lines(path: Path, low: int, high: int) -> Iterator[Line]:
    """Yield ``(start, line)`` of the lines that start in bytes ``[low, high)``."""
    with path.open("rb") as file:
        if low > 0:
            # Read from the byte before `low`: if it ends a line, the line at `low` belongs to this
            # block. The read is bounded, so that a line of many blocks is not read once per block.
            file.seek(low - 1)
            if not file.readline(high - low + 1).endswith(b"\n"):
                return
        while (start := file.tell()) < high:
            yield start, file.readline()


def _all_lines(path: Path) -> Iterator[Line]:
    """Yield every line of a compressed file with its offset in the text."""
    start, rest = 0, b""
    with open_text(path) as file:
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")  # a carriage return ends no line
            for line in lines:
                yield start, line + b"\n"
                start += len(line) + 1
    if rest:
        yield start, rest
