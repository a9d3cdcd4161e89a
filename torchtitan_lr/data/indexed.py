# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Megatron's indexed format: tokens of many documents in two files, ``X.bin`` and ``X.idx``.

Megatron-LM and NeMo Curator write it too. ``X.bin`` has the tokens alone. ``X.idx`` has, little
endian: the magic ``MMIDIDX\0\0``, version 1 (u64), a code of the tokens' type (u8), the number of
sequences n and of document borders m (u64 each), the sequences' lengths in tokens (n int32), where
they start in bytes (n int64), and the borders of documents as counts of sequences (m int64, from 0
to n). We write one sequence per document; other writers may write several.
"""

from __future__ import annotations

import os
import struct
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"

DTYPES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Codes of the types that token ids and loss masks can have."""

_HEADER = struct.Struct("<9sQBQQ")
KEY = "training.dataset_path"


class IndexedDataset:
    """One pair of files, opened for reading.

    Opening reads the header and the ends of the index, whatever the size of the files: it finds a
    file that was cut and an index of other tokens. `check` reads all of the index.

    Args:
        prefix: Path of the two files without ``.bin`` and ``.idx``.
        key: The TOML key to name in errors.

    Attributes:
        prefix: As given.
        dtype: The tokens' type.
        num_sequences: Sequences in the index.
        num_documents: Documents in the index.
        num_tokens: Tokens of all of them.

    Raises:
        DataError: A file is missing, damaged, cut, or of another pair.
    """

    def __init__(self, prefix: str | Path, key: str = KEY) -> None:
        self.prefix = str(prefix)
        self._key = key
        try:
            index, held = os.path.getsize(f"{prefix}.idx"), os.path.getsize(f"{prefix}.bin")
            with open(f"{prefix}.idx", "rb") as file:
                head = file.read(_HEADER.size)
        except OSError as error:
            raise self._error(".idx", f"a readable pair of .bin and .idx ({error})") from error
        if len(head) < _HEADER.size or head[:9] != MAGIC:
            raise self._error(".idx", f"an index of Megatron's format, which begins {MAGIC!r}")
        _, version, code, count, borders = _HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            want = f"version 1 and a type of {sorted(DTYPES)}, not version {version}, type {code}"
            raise self._error(".idx", want)
        # Counts are from the file: compare in Python's integers, before numpy sees them. A byte
        # per sequence (multimodal modes) may follow.
        size = _HEADER.size + 12 * count + 8 * borders
        if borders < 1 or index not in (size, size + count):
            want = f"an intact index: {count} sequences and {borders} borders do not fill its"
            raise self._error(".idx", f"{want} {index} bytes")
        self.dtype = np.dtype(DTYPES[code])
        self.num_sequences, self.num_documents = int(count), int(borders) - 1
        self.num_tokens, rest = divmod(held, self.dtype.itemsize)
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if count else 0
        if rest or end != held:
            want = f"the {end} bytes that {Path(self.prefix).name}.idx ends at, not {held}"
            raise self._error(".bin", f"{want}: it was cut, or the index is of another .bin")

    def _error(self, suffix: str, want: str) -> DataError:
        return DataError(self._key, f"{self.prefix}{suffix}", want)

    def _part(self, dtype: npt.DTypeLike, start: int, count: int) -> npt.NDArray[Any]:
        if not count:  # nothing can be mapped
            return np.empty(0, dtype=dtype)
        return np.asarray(
            np.memmap(f"{self.prefix}.idx", dtype, "r", _HEADER.size + start, (count,))
        )

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence ``(n,)``, mapped."""
        return self._part("<i4", 0, self.num_sequences)

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Bytes before each sequence ``(n,)``, mapped."""
        return self._part("<i8", 4 * self.num_sequences, self.num_sequences)

    @cached_property
    def borders(self) -> npt.NDArray[np.int64]:
        """Sequences before each document, and the end ``(documents + 1,)``, mapped."""
        return self._part("<i8", 12 * self.num_sequences, self.num_documents + 1)

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Tokens up to the end of each document ``(documents,)``, in memory."""
        sizes = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return sizes[self.borders[1:]]

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens ``(num_tokens,)``, mapped and read-only."""
        if not self.num_tokens:
            return np.empty(0, dtype=self.dtype)
        # A plain array of the mapped file: slices of a memmap cost more than what they copy.
        return np.asarray(np.memmap(f"{self.prefix}.bin", self.dtype.newbyteorder("<"), "r"))

    def check(self) -> None:
        """Read the whole index.

        Raises:
            DataError: A sequence does not start where the one before it ends, or a document's
                borders are not in order.
        """
        lengths, borders = np.asarray(self.lengths), np.asarray(self.borders)
        if self.num_sequences and int(lengths.min()) < 0:
            raise self._error(".idx", "lengths of at least 0")
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        if not np.array_equal(self.offsets, np.concatenate([[0], ends])[:-1]):
            raise self._error(".idx", "sequences that follow each other without gaps")
        in_order = borders[0] == 0 and borders[-1] == self.num_sequences
        if not in_order or (np.diff(borders) < 0).any():
            raise self._error(".idx", f"borders of documents from 0 to {self.num_sequences}")


class IndexedWriter:
    """Writes one pair of files; what a killed process has written can be gone on with.

    The lengths of the documents so far are in ``X.lengths`` beside the tokens, until whoever made
    the writer deletes it. The index comes last, by a rename: a pair with an index is whole.

    Args:
        prefix: Path of the two files without ``.bin`` and ``.idx``.
        dtype: The tokens' type.
        documents: Documents to keep of files that exist.
        tokens: Tokens of them.

    Attributes:
        num_documents: Documents written.
        num_tokens: Tokens written.
    """

    def __init__(
        self, prefix: str | Path, dtype: npt.DTypeLike, documents: int = 0, tokens: int = 0
    ) -> None:
        self._prefix, self.dtype = str(prefix), np.dtype(dtype)
        self._code = next(code for code, known in DTYPES.items() if self.dtype == known)
        self._tokens = _open_at(f"{prefix}.bin", tokens * self.dtype.itemsize)
        self._lengths = _open_at(f"{prefix}.lengths", documents * 4)
        self.num_documents, self.num_tokens = documents, tokens

    def append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Append documents.

        Args:
            tokens: Tokens of all of them, one after another.
            lengths: Tokens of each.

        Raises:
            OSError: The disk is full.
        """
        little = self.dtype.newbyteorder("<")
        self._tokens.write(np.ascontiguousarray(tokens, dtype=little).data)
        self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files without an index."""
        self._tokens.close()
        self._lengths.close()

    def finish(self) -> None:
        """Write the index and close the files."""
        self.flush()
        self.close()
        lengths = np.fromfile(f"{self._prefix}.lengths", dtype="<i4")
        count = len(lengths)
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        scratch = f"{self._prefix}.idx.tmp"
        with open(scratch, "wb") as file:
            file.write(_HEADER.pack(MAGIC, 1, self._code, count, count + 1))
            file.write(lengths.data)
            file.write(np.concatenate([np.zeros(1, "<i8"), ends])[:count].astype("<i8").data)
            file.write(np.arange(count + 1, dtype="<i8").data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, f"{self._prefix}.idx")


def _open_at(path: str, size: int) -> IO[bytes]:
    """Open a file for appending behind its first ``size`` bytes; the rest is dropped."""
    file = open(path, "ab")  # noqa: SIM115 - the writer closes it
    file.truncate(size)
    file.seek(size)
    return file
