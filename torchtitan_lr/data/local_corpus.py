# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The user's .txt, .jsonl and .parquet files as a corpus, streamed block by block.

Each file is cut into blocks by its size alone, so opening a corpus costs one ``stat`` per file:

* .txt and .jsonl: byte ranges. A block holds the lines that *start* in its range; a line that
  crosses the end is read to its end, and the next block skips it.
  Those of pairs and chats are a :class:`~torchtitan_lr.data.pair_corpora.LocalPairs`.
* .gz and .zst of these: parts interleaved over the file (:mod:`torchtitan_lr.data.text_files`).
* .parquet: slices of rows. The reader decodes only the ``text`` column of the row groups that
  overlap the slice, each from its start. Row groups of about the size of a block are read fastest.

A document is a line's ``"text"`` (.jsonl), a row's ``text`` (.parquet; both names can be set), or
all lines of a block (.txt: a file no larger than a block is one document; compressed, 16 KiB are).

One document in 200 is held out (:mod:`torchtitan_lr.data.held_out`). The blocks of a .txt file
depend on the batch, so its held-out units are pieces: the lines that start in the same 4 KiB.
"""

from __future__ import annotations

import codecs
import functools
import glob
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.data.blocks import BlockCorpus, Split, file_stamp
from torchtitan_lr.data.held_out import (
    ONE_IN,
    SMALL_BYTES,
    USUAL_LIMIT,
    document_hash,
    small_limit,
)
from torchtitan_lr.data.text_files import (
    MOST_PARTS,
    Line,
    is_compressed,
    kind_of,
    line_number,
    lines_of,
    open_text,
    piece_of,
    run_of,
)
from torchtitan_lr.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SUFFIXES = (".txt", ".jsonl", ".parquet")
MORE = " (.txt and .jsonl also with .gz or .zst)"
TEXT = "text"

# Smaller blocks would cut .txt files into snippets; larger blocks would make resuming slow.
MIN_BLOCK_BYTES = 1 << 10
MAX_BLOCK_BYTES = 1 << 20
BLOCKS_PER_LANE = 4

HEAD_BYTES = 1 << 16
"""Bytes at the start of a file that the encoding check reads."""


class LocalCorpus(BlockCorpus):
    """The documents of a file, of a folder's files, or of the files that match a pattern.

    Args:
        path: File, folder (searched with its subfolders) or glob pattern; files are sorted by path.
        key: The TOML key to name in errors.
        rows: Rows of the global batch. Blocks are sized to give each row four blocks, between
            1 KiB and 1 MiB; without ``rows`` they have 1 MiB.
        split: The held-out part, the training part, or both.
        max_bad_records: See :class:`BlockCorpus`.
        column: Name of the text in .jsonl and .parquet.

    Raises:
        ConfigError: No such file, no file with a supported suffix, or only empty files.
        DataError: A small corpus, which is read on opening, has an unreadable record.
    """

    def __init__(
        self,
        path: str,
        key: str,
        rows: int | None = None,
        split: Split = "all",
        max_bad_records: int = 0,
        column: str = TEXT,
    ) -> None:
        self._column = column
        found = find_files(path, key)
        root = Path(os.path.commonpath([file.parent for file in found]))
        self._paths = found
        sizes = [file.stat().st_size for file in found]
        names = [file.relative_to(root).as_posix() for file in found]
        super().__init__("local", key, zip(names, sizes, strict=True), max_bad_records)
        wanted = MAX_BLOCK_BYTES if rows is None else sum(sizes) // (BLOCKS_PER_LANE * rows)
        self.block_bytes = min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, wanted))
        # File i has the blocks [ends[i - 1], ends[i]).
        self._counts = [-(-size // self.block_bytes) for size in sizes]
        for index, file in enumerate(found):
            if is_compressed(file):
                self._counts[index] = min(MOST_PARTS, self._counts[index])
        self._ends = list(accumulate(self._counts))
        self._split = split
        self._limit = USUAL_LIMIT
        if split != "all" and sum(sizes) <= SMALL_BYTES:
            self.check_encoding()
            self._limit = small_limit(self._hashes())

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return self._paths

    def check_encoding(self) -> None:
        """Raise if the start of a .txt or .jsonl file is not text in UTF-8.

        Raises:
            DataError: A file is unreadable, binary or in another encoding.
        """
        for path in self._paths:
            if kind_of(path) == ".parquet":
                continue
            try:
                with open_text(path) as file:
                    head = file.read(HEAD_BYTES)
            except OSError as error:
                why = error.strerror or error
                raise DataError(self.key, str(path), f"a readable file ({why})") from error
            if (what := _not_utf8(head)) is not None:
                raise DataError(self.key, str(path), f"text in UTF-8; this is {what}")

    def fingerprint(self) -> str:
        """Return the fingerprint of :class:`BlockCorpus`, with the held-out fraction appended."""
        rule = f" held_out=1/{ONE_IN}" if self._split != "all" else ""
        return super().fingerprint() + rule + self._named()

    def _named(self) -> str:
        return "" if self._column == TEXT else f" column={self._column}"

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all files."""
        return self._ends[-1]

    def origin(self) -> str:
        """Return the first file's path."""
        return str(self._paths[0])

    def stamp(self, block: int) -> str | None:
        """Return the stamp of a block's file, the block's part of it, and the held-out rule."""
        index, part, count = self._place(block)
        stamp = file_stamp(self._paths[index])
        return stamp and f"{stamp} {part}/{count} {self._split} {self._limit}" + self._named()

    def documents(self, block: int) -> Iterator[str | DataError]:
        """Yield the documents of one block that belong to the split.

        Yields:
            A document, or a DataError for an invalid line or for the unreadable rest of a block.
        """
        index, part, count = self._place(block)
        path = self._paths[index]
        if kind_of(path) == ".txt":
            yield from self._texts(index, part, count)
            return
        for record in self._records(path, index, part, count):
            if isinstance(record, DataError) or self._wanted(self.hash_of(record)):
                yield record

    def parse_line(self, line: bytes) -> str:
        """Return the document of a .jsonl line, "" for none.

        Raises:
            ValueError: The line is not valid; the message is what was expected.
        """
        try:
            text = json.loads(line)[self._column]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ValueError(f'a JSON object with a string "{self._column}"')
        # JSON can encode a lone surrogate, which tokenizers reject.
        return text.encode("utf-8", errors="replace").decode("utf-8")

    def hash_of(self, document: str) -> int:
        """Return the hash by which a document of a .jsonl or .parquet file is held out."""
        return document_hash(document)

    def _place(self, block: int) -> tuple[int, int, int]:
        """Return the index of a block's file, the block's index in it, and the file's blocks."""
        index = bisect_right(self._ends, block)
        count = self._counts[index]
        return index, block - (self._ends[index] - count), count

    def _wanted(self, key: int) -> bool:
        return self._split == "all" or (key < self._limit) == (self._split == "validation")

    def _hashes(self) -> Iterator[tuple[int, int]]:
        """Yield the hash and the bytes of every document or piece; this reads the whole corpus."""
        for block in range(self.num_blocks):
            index, part, count = self._place(block)
            path, (name, _) = self._paths[index], self._files[index]
            if kind_of(path) == ".txt":
                for piece, lines in groupby(self._lines_of(index, part, count), piece_of):
                    yield _piece_hash(name, piece), sum(len(line) for _, line in lines)
                continue
            for record in self._records(path, index, part, count):
                if isinstance(record, DataError):
                    self.skip(record)
                else:
                    yield self.hash_of(record), len(record.encode())

    def _lines_of(self, index: int, part: int, count: int) -> Iterator[Line]:
        return lines_of(self._paths[index], self._files[index][1], part, count)

    def _texts(self, index: int, part: int, count: int) -> Iterator[str | DataError]:
        """Yield the text of a block, cut where pieces of the other split are left out."""
        name = self._files[index][0]

        @functools.cache
        def wanted(piece: int) -> bool:
            return self._wanted(_piece_hash(name, piece))

        lines = self._lines_of(index, part, count)
        try:
            runs = is_compressed(self._paths[index])  # its neighbouring runs are in other parts
            for (ours, _), run in groupby(
                lines, lambda line: (wanted(piece_of(line)), runs and run_of(line))
            ):
                text = b"".join(line for _, line in run).decode("utf-8", errors="replace")
                if ours and text:
                    yield text
        except OSError as error:
            yield self._unreadable(index, error)

    def _unreadable(self, index: int, error: OSError) -> DataError:
        why = error.strerror or error
        return DataError(self.key, str(self._paths[index]), f"a readable file ({why})")

    def _records(self, path: Path, index: int, part: int, count: int) -> Iterator[str | DataError]:
        """Yield the records of a .jsonl or .parquet block, of both splits."""
        if kind_of(path) == ".parquet":
            yield from self._parquet(path, part, count)
            return
        try:
            yield from self._jsonl(path, self._lines_of(index, part, count))
        except OSError as error:
            yield self._unreadable(index, error)

    def _jsonl(self, path: Path, lines: Iterator[Line]) -> Iterator[str | DataError]:
        for start, line in lines:
            if not line.strip():
                continue
            try:
                text = self.parse_line(line)
            except ValueError as error:
                where = f"{path}:{line_number(path, start)}"
                yield DataError(self.key, where, str(error))
            else:
                if text:
                    yield text

    def _parquet(self, path: Path, part: int, count: int) -> Iterator[str | DataError]:
        # Imported late: text files do not need pyarrow.
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                kind = file.schema_arrow.field(self._column).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    yield DataError(self.key, str(path), f"strings in column '{self._column}'")
                    return
                rows = file.metadata.num_rows
                yield from _rows(
                    file, part * rows // count, (part + 1) * rows // count, self._column
                )
        # A damaged file can raise any of these; ValueError means text that is not UTF-8.
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            want = f"intact parquet with a column '{self._column}' ({type(error).__name__})"
            yield DataError(self.key, str(path), want)


def find_files(path: str, key: str) -> list[Path]:
    """Return the non-empty files with a supported suffix, sorted by path.

    Args:
        path: File, folder or glob pattern.
        key: The TOML key to name in errors.

    Raises:
        ConfigError: There is none.
    """
    target = user_path(path, key)
    if target.is_file():
        found = [target]
    elif target.is_dir():
        found = [file for file in target.rglob("*") if file.is_file()]
    else:
        found = [Path(name) for name in glob.glob(str(target), recursive=True)]
        if not found:
            raise ConfigError(key, path, "an existing file or folder, or a pattern that matches")
    known = [file for file in found if _is_known(file) and file.is_file()]
    if not known:
        raise ConfigError(key, path, "files that end in " + ", ".join(SUFFIXES) + MORE)
    filled = [file for file in known if file.stat().st_size]
    if not filled:
        raise ConfigError(key, path, "files that are not empty")
    return sorted(filled, key=lambda file: file.as_posix())


def _is_known(file: Path) -> bool:
    kind = kind_of(file)
    return kind in SUFFIXES and not (is_compressed(file) and kind == ".parquet")


def _not_utf8(head: bytes) -> str | None:
    """Return the likely encoding of a file's start; None for UTF-8, even with a few bad bytes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16 (or 32)"
    zeros = head.count(b"\0")
    if zeros * 4 > len(head):  # every other byte of Latin letters
        return "UTF-16 without a byte order mark, or binary"
    if zeros:
        return "binary"
    text = head.decode("utf-8", errors="replace")
    if text.count("\ufffd") * 10 > len(text):
        return "in another encoding, or binary"
    return None


def _piece_hash(name: str, piece: int) -> int:
    """Hash a piece's position; hashing its text would require reading the adjacent blocks."""
    return document_hash(f"{name}:{piece}")


def _rows(file: pq.ParquetFile, low: int, high: int, column: str) -> Iterator[str]:
    """Yield the non-empty texts of rows ``[low, high)``, decoding only overlapping row groups."""
    start = 0
    for group in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        if start < high and end > low:
            batches = file.iter_batches(batch_size=256, row_groups=[group], columns=[column])
            for batch in batches:
                if start >= high:
                    break
                first, last = max(low - start, 0), min(high - start, batch.num_rows)
                if first < last:
                    texts = batch.column(0).slice(first, last - first).to_pylist()
                    yield from (text for text in texts if text)
                start += batch.num_rows
        start = end
