# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Megatron's indexed format: tokens of many documents in two files, ``X.bin`` and ``X.idx``.

Megatron-LM and NeMo Curator write it too. ``X.bin`` has the tokens alone. ``X.idx`` has, little
endian: the magic ``MMIDIDX\0\0``, version 1 (u64), a code of the tokens' type (u8), the number of
sequences n and of document borders m (u64 each), the sequences' lengths in tokens (n int32), where
they start in bytes (n int64), and the borders of documents as counts of sequences (m int64, from 0
to n). We write one sequence per document; other writers may write several.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.errors import DataError

KEY = "training.dataset_path"

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")

_DTYPES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Codes of the types that token ids and loss masks can have."""


class IndexedDataset:
    """One pair of files, opened for reading.

    Opening reads the header and the ends of the index, whatever the size of the files: it finds a
    file that was cut and an index of other tokens. `check` reads all of the index.

    Args:
        prefix: Path of the two files without ``.bin`` and ``.idx``.
        key: The TOML key to name in errors.

    Attributes:
        num_sequences, num_documents, num_tokens: Their numbers.
        lengths: Tokens of each sequence ``(n,)``, mapped; offsets: bytes before each ``(n,)``.
        borders: Sequences before each document, and the end ``(documents + 1,)``, mapped.

    Raises:
        DataError: A file is missing, damaged, cut, or of another pair.
    """

    def __init__(self, prefix: str | Path, key: str = KEY) -> None:
        self.prefix, self._key = str(prefix), key
        try:
            with open(f"{prefix}.idx", "rb") as file:
                index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._file = os.open(f"{prefix}.bin", os.O_RDONLY)
        except (OSError, ValueError) as error:  # ValueError: there is nothing to map
            raise self._error(".idx", f"a readable pair of .bin and .idx ({error})") from error
        weakref.finalize(self, os.close, self._file)
        # Searching touches pages here and there; the kernel would read 128 KiB around each.
        index.madvise(mmap.MADV_RANDOM)
        if len(index) < _HEADER.size or index[:9] != _MAGIC:
            raise self._error(".idx", f"an index of Megatron's format, which begins {_MAGIC!r}")
        _, version, code, count, borders = _HEADER.unpack_from(index)
        if version != 1 or code not in _DTYPES:
            want = f"version 1 and a type of {sorted(_DTYPES)}, not version {version}, type {code}"
            raise self._error(".idx", want)
        # Counts are from the file: compare in Python's integers, before numpy sees them. A byte
        # per sequence (multimodal modes) may follow.
        size = _HEADER.size + 12 * count + 8 * borders
        if borders < 1 or len(index) not in (size, size + count):
            want = f"an intact index: {count} sequences and {borders} borders do not fill its"
            raise self._error(".idx", f"{want} {len(index)} bytes")
        self._dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        self._size = self._dtype.itemsize
        self.lengths = np.frombuffer(index, "<i4", count, _HEADER.size)
        self.offsets = np.frombuffer(index, "<i8", count, _HEADER.size + 4 * count)
        self.borders = np.frombuffer(index, "<i8", borders, _HEADER.size + 12 * count)
        held = os.fstat(self._file).st_size
        self.num_sequences, self.num_documents = count, borders - 1
        self.num_tokens = held // self._size
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * self._size if count else 0
        if held % self._size or end != held:
            want = f"the {end} bytes that {Path(self.prefix).name}.idx ends at, not {held}"
            raise self._error(".bin", f"{want}: it was cut, or the index is of another .bin")

    def _error(self, suffix: str, want: str) -> DataError:
        return DataError(self._key, f"{self.prefix}{suffix}", want)

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Read the tokens from ``start`` to before ``stop``, by default all ``(n,)``.

        Raises:
            DataError: The file has become shorter, or cannot be read.
        """
        count = ((self.num_tokens if stop is None else stop) - start) * self._size
        try:
            # One call for a window: of a mapped file every page would fault, with read-ahead.
            found = os.pread(self._file, count, start * self._size)
            return np.frombuffer(found, self._dtype, count // self._size)
        except (OSError, ValueError) as error:  # ValueError: fewer tokens than there were
            raise self._error(".bin", f"a file whose tokens can all be read ({error})") from error

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the places of ``start .. stop - 1`` at which a document begins ``(n,)``."""
        if self.num_sequences != self.num_documents:  # several per document, of another writer
            starts = np.append(0, self.ends)
            return starts[slice(*np.searchsorted(starts, (start, stop)))]
        # The binary search touches a few pages of the index; nothing of it is kept in memory.
        first, last = np.searchsorted(self.offsets, (start * self._size, stop * self._size))
        return self.offsets[first:last] // self._size

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Tokens up to the end of each document ``(documents,)``, in memory."""
        return np.append(0, np.cumsum(self.lengths, dtype=np.int64))[self.borders[1:]]

    def check(self) -> None:
        """Read the whole index.

        Raises:
            DataError: Sequences do not follow each other, or borders of documents are not in order.
        """
        sizes, borders = self.lengths * np.int64(self._size), self.borders
        if (sizes < 0).any():
            raise self._error(".idx", "lengths of at least 0")
        if not np.array_equal(self.offsets, np.cumsum(sizes) - sizes):
            raise self._error(".idx", "sequences that follow each other without gaps")
        ends = (int(borders[0]), int(borders[-1]))
        if ends != (0, self.num_sequences) or (np.diff(borders) < 0).any():
            raise self._error(".idx", f"borders of documents from 0 to {self.num_sequences}")


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Write a file by a rename: after a crash it is the old one or the new one.

    Raises:
        OSError: The disk is full.
    """
    scratch = f"{path}.tmp"
    with open(scratch, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def write_index(prefix: str | Path, dtype: npt.DTypeLike, lengths: npt.NDArray[Any]) -> None:
    """Write the ``.idx`` of a ``.bin``; a pair that has one is whole.

    Args:
        prefix: Path of the two files without ``.bin`` and ``.idx``.
        dtype: Type of the tokens.
        lengths: Tokens of each document ``(n,)``.

    Raises:
        OSError: The disk is full.
    """
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    count, sizes = len(lengths), lengths * np.int64(np.dtype(dtype).itemsize)
    with replacing(f"{prefix}.idx") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, count, count + 1))
        file.write(lengths.astype("<i4").data)
        for values in (np.cumsum(sizes) - sizes, np.arange(count + 1)):
            file.write(values.astype("<i8").data)
