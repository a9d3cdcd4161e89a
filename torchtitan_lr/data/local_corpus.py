# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One's own files as a corpus: .txt, .jsonl and .parquet, streamed, never read as a whole.

Each file is cut into blocks by its size alone, so that opening a corpus costs one ``stat`` a file:

* .txt and .jsonl: byte ranges. A block holds the lines that *start* in its range; a line that
  crosses the end is read to its end, and the next block skips it.
* .parquet: slices of rows. The reader decodes, of the row groups that a slice touches, the
  ``text`` column only, from the group's start; groups not much larger than a block read fastest.

A document is a line's ``"text"`` (.jsonl), a row's ``text`` (.parquet), or all lines of a block
(.txt: a file no larger than a block is one document).
"""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lr.data.corpora import BlockCorpus
from torchtitan_lr.data.paths import user_path
from torchtitan_lr.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SUFFIXES = (".txt", ".jsonl", ".parquet")
TEXT = "text"

# Smaller blocks would cut .txt files into snippets; larger ones make resuming slow.
MIN_BLOCK_BYTES = 1 << 10
MAX_BLOCK_BYTES = 1 << 20
BLOCKS_PER_LANE = 4


class LocalCorpus(BlockCorpus):
    """The documents of a file, of a folder's files, or of the files a pattern matches.

    Args:
        path: File, folder (searched with its subfolders) or glob pattern; files are taken in the
            order of their paths.
        key: The TOML key to name in errors.
        rows: Rows of the global batch; blocks shrink until each row has four, down to 1 KiB. By
            default blocks are as large as they may be, 1 MiB.

    Raises:
        ConfigError: No such file, no file of a known kind, or only empty ones.
    """

    def __init__(self, path: str, key: str, rows: int | None = None) -> None:
        found = _find(path, key)
        root = Path(os.path.commonpath([file.parent for file in found]))
        self._paths = found
        sizes = [file.stat().st_size for file in found]
        names = [file.relative_to(root).as_posix() for file in found]
        super().__init__("local", key, zip(names, sizes, strict=True))
        wanted = MAX_BLOCK_BYTES if rows is None else sum(sizes) // (BLOCKS_PER_LANE * rows)
        self.block_bytes = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, wanted))
        # Of file i: blocks [ends[i - 1], ends[i]).
        self._counts = [-(-size // self.block_bytes) for size in sizes]
        self._ends = list(accumulate(self._counts))

    @property
    def num_blocks(self) -> int:
        """How many blocks all files together have."""
        return self._ends[-1]

    def documents(self, block: int) -> Iterator[str]:
        """Yield the documents of one block.

        Args:
            block: Which block.

        Raises:
            ConfigError: A line or a file that does not hold what it should.
        """
        index = bisect_right(self._ends, block)
        path, count = self._paths[index], self._counts[index]
        part = block - (self._ends[index] - count)
        if path.suffix == ".parquet":
            yield from self._parquet(path, part, count)
            return
        size = self._files[index][1]
        lines = _lines(path, part * size // count, (part + 1) * size // count)
        try:
            if path.suffix == ".jsonl":
                yield from self._jsonl(path, lines)
            elif text := b"".join(line for _, line in lines).decode("utf-8", errors="replace"):
                yield text
        except OSError as error:
            raise ConfigError(self.key, str(path), f"a readable file ({error})") from error

    def _jsonl(self, path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[str]:
        for start, line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = record[TEXT]
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                text = None
            if not isinstance(text, str):
                where = f"{path}:{_line_number(path, start)}"
                raise ConfigError(self.key, where, f'a JSON object with a string "{TEXT}"')
            if text:
                # JSON can spell half a surrogate pair, which no tokenizer takes.
                yield text.encode("utf-8", errors="replace").decode("utf-8")

    def _parquet(self, path: Path, part: int, count: int) -> Iterator[str]:
        # Late: text needs no pyarrow.
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                kind = file.schema_arrow.field(TEXT).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    raise ConfigError(self.key, str(path), f"strings in column '{TEXT}'")
                rows = file.metadata.num_rows
                yield from _rows(file, part * rows // count, (part + 1) * rows // count)
        except ConfigError:
            raise
        # Whatever its parts stumble over in a damaged file; ValueError is text that is no UTF-8.
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            want = f"intact parquet with a column '{TEXT}' ({type(error).__name__})"
            raise ConfigError(self.key, str(path), want) from error


def _find(path: str, key: str) -> list[Path]:
    """Return the files with some bytes in them, sorted."""
    target = user_path(path, key)
    if target.is_file():
        found = [target]
    elif target.is_dir():
        found = [file for file in target.rglob("*") if file.is_file()]
    else:
        found = [Path(name) for name in glob.glob(str(target), recursive=True)]
        if not found:
            raise ConfigError(key, path, "an existing file or folder, or a pattern that matches")
    known = [file for file in found if file.suffix in SUFFIXES and file.is_file()]
    if not known:
        raise ConfigError(key, path, "files that end in " + ", ".join(SUFFIXES))
    filled = [file for file in known if file.stat().st_size]
    if not filled:
        raise ConfigError(key, path, "files that are not empty")
    return sorted(filled, key=lambda file: file.as_posix())


def _lines(path: Path, low: int, high: int) -> Iterator[tuple[int, bytes]]:
    """Yield ``(start, line)`` of the lines that start in bytes ``[low, high)``."""
    with path.open("rb") as file:
        if low > 0:
            # From the byte before: where that is a line's end, the line at `low` is ours. Bounded,
            # so that a line of many blocks is not read again by each of them.
            file.seek(low - 1)
            if not file.readline(high - low + 1).endswith(b"\n"):
                return
        while (start := file.tell()) < high:
            yield start, file.readline()


def _line_number(path: Path, start: int) -> int:
    """Count lines up to an offset; only errors need it, so it may read the file."""
    number, left = 1, start
    with path.open("rb") as file:
        while left and (chunk := file.read(min(left, MAX_BLOCK_BYTES))):
            number += chunk.count(b"\n")
            left -= len(chunk)
    return number


def _rows(file: pq.ParquetFile, low: int, high: int) -> Iterator[str]:
    """Yield the non-empty texts of rows ``[low, high)``, decoding no row group outside."""
    start = 0
    for group in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        if start < high and end > low:
            batches = file.iter_batches(batch_size=256, row_groups=[group], columns=[TEXT])
            for batch in batches:
                if start >= high:
                    break
                first, last = max(low - start, 0), min(high - start, batch.num_rows)
                if first < last:
                    texts = batch.column(0).slice(first, last - first).to_pylist()
                    yield from (text for text in texts if text)
                start += batch.num_rows
        start = end
