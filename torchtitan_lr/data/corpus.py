# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""A prepared corpus: a folder of shards in Megatron's format, and ``corpus.json`` about them.

``train-*`` are trained on, ``held_out-*`` are for validation. Of pairs and chats each shard has a
second pair of files, ``train-00000.loss``: uint8 of the same lengths, 1 where the token is a
target. A folder without ``corpus.json``, as Megatron-LM and NeMo Curator write it, is all training.

Opening reads ``corpus.json`` alone, so it costs the same for a gigabyte and for a terabyte. Shards
are opened when a row needs them, and a few stay open: a mapped file holds a descriptor.

Megatron's indexed format holds the tokens of many documents in two files. ``X.bin`` has the tokens
alone. ``X.idx`` has, little endian: the magic ``MMIDIDX\0\0``, version 1 (u64), a code of the
tokens' type (u8), the number of sequences n and of document borders m (u64 each), the sequences'
lengths in tokens (n int32), where they start in bytes (n int64), and the borders of documents as
counts of sequences (m int64, from 0 to n). We write one sequence per document; other writers may
write several.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import repeat
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan_lr.errors import ConfigError, DataError

KEY = "training.dataset_path"

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")

_DTYPES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Codes of the types that token ids and loss masks can have."""

RECORD = "corpus.json"
PARTS = ("train", "held_out")
FORMAT = "torchtitan_lr tokens 1"

Kind = Literal["text", "pairs"]

OPEN_SHARDS = 24  # stay open in a process: pairs of files, with two descriptors each
CHECKED_BYTES = 256 << 20  # `Corpus.check` compares checksums of shards up to this size in sum


@dataclass(frozen=True)
class ShardInfo:
    """One shard."""

    tokens: int
    documents: int
    sha256: str  # of its files; empty in a folder without `corpus.json`
    name: str  # of its files without .bin and .idx


@dataclass(frozen=True)
class Corpus:
    """A prepared folder."""

    folder: Path
    train: list[ShardInfo]
    held_out: list[ShardInfo]
    kind: Kind  # pairs have a loss mask
    identity: str  # digest of the content; the same for equal tokens, wherever they are
    record: dict[str, Any] = field(repr=False, compare=False)  # all of `corpus.json`

    @staticmethod
    def open(folder: str | Path, key: str = KEY) -> Corpus:
        """Read ``corpus.json``; of a folder without it, the headers of its shards.

        Raises:
            ConfigError: There is no prepared corpus in the folder.
            DataError: ``corpus.json`` or a shard is unreadable.
        """
        place = Path(folder)
        try:
            found = json.loads((place / RECORD).read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']!r}")
            train, held_out = ([ShardInfo(**shard) for shard in found[part]] for part in PARTS)
            return Corpus(place, train, held_out, found["kind"], found["identity"], found)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            want = f"a record of format {FORMAT!r} ({type(error).__name__}: {error})"
            raise DataError(key, str(place / RECORD), want) from error
        train = []
        for path in sorted(place.glob("*.idx")):
            shard = IndexedDataset(path.with_suffix(""), key)
            train.append(ShardInfo(shard.num_tokens, shard.num_documents, "", path.stem))
        if not train:
            want = f"a folder with {RECORD}, or with .bin and .idx files"
            raise ConfigError(key, str(place), want)
        return Corpus(place, train, [], "text", identity_of("text", "", [train, []]), {})

    def tokens(self, held_out: bool = False) -> int:
        """Return the number of tokens of a part."""
        return sum(shard.tokens for shard in (self.held_out if held_out else self.train))

    def shard(self, info: ShardInfo, loss: bool = False) -> IndexedDataset:
        """Open a shard, or its loss mask; the last few stay open.

        Raises:
            DataError: Its files are damaged, or not as many tokens as recorded.
        """
        return _opened(self.folder, info, loss)

    def check(self) -> None:
        """Check the files of every shard, before a run.

        Sizes, headers and the ends of the index are read of all shards. Whole indices and
        checksums are compared up to :data:`CHECKED_BYTES`, so that a terabyte starts as fast as a
        gigabyte; ``torchtitan-lr prepare --verify`` compares them all.

        Raises:
            DataError: A file is missing, cut, of another pair or changed.
        """
        _opened.cache_clear()  # what is there now
        left = CHECKED_BYTES
        for info in self.train + self.held_out:
            left -= sum(2 * each.num_tokens + 8 * each.num_sequences for each in self._pairs(info))
            if left >= 0:
                self.check_shard(info)

    def check_shard(self, info: ShardInfo) -> None:
        """Read a whole shard and compare it with the record; errors as for :meth:`check`."""
        opened = self._pairs(info)
        found = checksum(opened[0].prefix, self.kind)
        for shard in opened:
            shard.check()
        if info.sha256 and found != info.sha256:
            want = f"files with the checksum {info.sha256[:12]} of {RECORD}, not {found[:12]}"
            want += ": they were changed; prepare them again"
            raise DataError(KEY, opened[0].prefix, want)

    def _pairs(self, info: ShardInfo) -> list[IndexedDataset]:
        return [self.shard(info, loss) for loss in (False, True)[: 1 + (self.kind == "pairs")]]


def save_record(folder: Path, about: dict[str, Any], counts: list[list[list[int]]]) -> Corpus:
    """Write ``corpus.json``, the last file of a preparation: a folder that has it is whole.

    ``about`` has the ``kind``, the tokenizer with its hash (``sha256``), and anything else. In
    ``counts`` are documents and tokens of each shard, to train on and held out.
    """
    kind, parts = about["kind"], dict[str, list[ShardInfo]]()
    with ThreadPoolExecutor() as threads:  # hashing does not hold Python's lock
        for part, pairs in zip(PARTS, counts, strict=True):
            names = [f"{part}-{index:05d}" for index in range(len(pairs))]
            # Read again from the disk, so that the checksums are of what is there.
            sums = threads.map(checksum, [str(folder / name) for name in names], repeat(kind))
            found = zip(names, pairs, sums, strict=True)
            parts[part] = [ShardInfo(size, n, digest, name) for name, (n, size), digest in found]
    identity = identity_of(kind, about["tokenizer"]["sha256"], list(parts.values()))
    record = {"format": FORMAT, "kind": kind, "identity": identity} | about
    record |= {part: [asdict(info) for info in infos] for part, infos in parts.items()}
    with replacing(folder / RECORD) as file:
        file.write(json.dumps(record, indent=1).encode())
    return Corpus.open(folder)


def checksum(prefix: str, kind: Kind) -> str:
    """Return the sha256 of a shard's files: .bin and .idx, of pairs then those of the mask."""
    digest = hashlib.sha256()
    for each in [prefix, f"{prefix}.loss"] if kind == "pairs" else [prefix]:
        for suffix in (".bin", ".idx"):
            with open(each + suffix, "rb") as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
    return digest.hexdigest()


def identity_of(kind: str, tokenizer: str, parts: list[list[ShardInfo]]) -> str:
    """Return the digest of a corpus' content, from those of its shards."""
    shards = [[(shard.tokens, shard.documents, shard.sha256) for shard in part] for part in parts]
    text = json.dumps([FORMAT, kind, tokenizer, shards])
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(OPEN_SHARDS)
def _opened(folder: Path, info: ShardInfo, loss: bool) -> IndexedDataset:
    # The last part of the name: a record cannot lead out of its folder. Joined here and not for
    # every row: a path costs as much as reading one.
    shard = IndexedDataset(str(folder / Path(info.name).name) + (".loss" if loss else ""))
    if (shard.num_tokens, shard.num_documents) != (info.tokens, info.documents):
        want = f"{info.tokens} tokens in {info.documents} documents as recorded"
        want += f", not {shard.num_tokens} in {shard.num_documents}"
        raise DataError(KEY, shard.prefix, want)
    return shard


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
