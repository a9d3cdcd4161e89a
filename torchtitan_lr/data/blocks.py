# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a corpus is, and a corpus made of blocks that are read independently."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torchtitan_lr.data.order import Order
from torchtitan_lr.data.stripes import BlockStream, DocumentStream
from torchtitan_lr.data.token_cache import TokenCache
from torchtitan_lr.errors import DataError

Split = Literal["train", "validation", "all"]


@dataclass(frozen=True)
class TextOptions:
    """Which text of a dataset is read; for ``hf``, and the column for ``local`` too.

    Attributes:
        column: Name of the text in a record.
        hf_name: The dataset's configuration, such as ``en``; None for its only one.
        hf_split: The split to train on.
        hf_held_out: The split to validate on; empty to hold out one document in 200.
        hf_streaming: Whether to stream the dataset, and not to prepare it on disk first.
    """

    column: str = "text"
    hf_name: str | None = None
    hf_split: str = "train"
    hf_held_out: str = ""
    hf_streaming: bool = True


class Corpus(Protocol):
    """A source of documents, read as parallel stripes or once from start to end."""

    name: str

    def fingerprint(self) -> str:
        """Return a one-line identity of the corpus, computed without reading its contents."""
        ...

    def num_stripes(self, rows: int) -> int:
        """Return the number of stripes for a global batch of ``rows`` rows, a divisor of it."""
        ...

    def stream(
        self, stripe: int, num_stripes: int, infinite: bool, order: Order | None = None
    ) -> DocumentStream:
        """Open one stripe's documents, in the fixed order or in another."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Yield every document once, in a fixed order."""
        ...


class BlockCorpus(ABC):
    """A corpus of independently readable blocks.

    Args:
        name: The corpus's name in the TOML.
        key: The TOML key to name in errors.
        files: ``(name, bytes)`` of each file, in order; input of the fingerprint.
        max_bad_records: Number of unreadable records that may be skipped.

    Attributes:
        skipped: Locations of the skipped records, without duplicates.
        cache: The tokens of its blocks, None without a cache.
        pairs: Whether the documents are records of pairs (:mod:`torchtitan_lr.data.pairs`).
    """

    cache: TokenCache | None = None
    pairs = False

    def __init__(
        self, name: str, key: str, files: Iterable[tuple[str, int]], max_bad_records: int = 0
    ) -> None:
        self.name = name
        self.key = key
        self._files = list(files)
        self._max_bad_records = max_bad_records
        self.skipped: set[str] = set()

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """The number of blocks."""

    @abstractmethod
    def documents(self, block: int) -> Iterator[str | DataError]:
        """Yield one block's non-empty documents in order, and a DataError per unreadable record."""

    def origin(self) -> str:
        """Return where the files are, which the fingerprint does not contain."""
        return ""

    def stamp(self, block: int) -> str | None:
        """Return what determines a block's documents: its file's size and times, and its part.

        Returns:
            The stamp; None if the file is gone, or if the corpus is not made of files.
        """
        del block
        return None

    def skip(self, error: DataError) -> None:
        """Record an unreadable record as skipped.

        Raises:
            DataError: ``max_bad_records`` records are skipped already.
        """
        most = self._max_bad_records
        if str(error.got) in self.skipped:
            return
        if len(self.skipped) >= most:
            more = f" (training.max_bad_records = {most} are skipped already)" if most else ""
            raise DataError(error.key, error.got, error.want + more)
        self.skipped.add(str(error.got))

    def fingerprint(self) -> str:
        """Return the name, the counts of blocks, files and bytes, and a hash of names and sizes."""
        digest = hashlib.sha256(repr(self._files).encode()).hexdigest()[:16]
        size = sum(size for _, size in self._files)
        return (
            f"{self.name} blocks={self.num_blocks} files={len(self._files)} bytes={size} {digest}"
        )

    def num_stripes(self, rows: int) -> int:
        """Return ``rows``: any number of stripes can share the blocks."""
        return rows

    def stream(
        self, stripe: int, num_stripes: int, infinite: bool, order: Order | None = None
    ) -> DocumentStream:
        """Open one stripe's documents (:class:`BlockStream`)."""
        return BlockStream(self, stripe, num_stripes, infinite, order)

    def __iter__(self) -> Iterator[str]:
        """Yield every document once, block by block."""
        for block in range(self.num_blocks):
            for document in self.documents(block):
                if isinstance(document, DataError):
                    self.skip(document)
                else:
                    yield document


def file_stamp(path: Path) -> str | None:
    """Return a file's path, size and times; None if there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
