# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tokens of a corpus on disk, so that no text is tokenised twice.

One file holds the documents of one block. Its path names the corpus, its folder, the tokenizer and
the block. Its header has the block's stamp: size and times of the file that was read, and the part
of it that was tokenised. An entry with another stamp or a wrong checksum is ignored and written
again.

Entries are renamed into place, so a reader sees a whole entry or none. Ranks and jobs that write
the same entry at the same time write the same bytes. No lock is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import numpy as np

from torchtitan_lr.data.encoding import Tokens
from torchtitan_lr.titan import logger

MAGIC = b"tokens 1"
"""First bytes of an entry; the number changes with the format."""

FREE_SHARE, FREE_BYTES = 0.1, 32 << 30
"""The cache leaves this share of the disk free, or these bytes if they are fewer."""

_PREFIX = struct.Struct("<8sII")  # magic, checksum of the rest, bytes of the header
_BLOCKS_PER_FOLDER = 1000


class TokenCache:
    """The cached blocks of one corpus and one tokenizer.

    A cache that cannot be written (a full disk, no permission) logs one warning; the run continues
    without it.

    Args:
        folder: Where all caches are; made when the first block is written.
        corpus: Identity of the corpus: its fingerprint and the place of its files.
        tokenizer: Identity of the tokenizer.
    """

    def __init__(self, folder: Path, corpus: str, tokenizer: str) -> None:
        key = hashlib.sha256(f"{corpus}\0{tokenizer}".encode()).hexdigest()[:24]
        self._folder = folder / key
        self._writes = True

    def path(self, block: int) -> Path:
        """Return the path of a block's entry."""
        return self._folder / str(block // _BLOCKS_PER_FOLDER) / f"{block}.tokens"

    def read(self, block: int, stamp: str) -> list[Tokens] | None:
        """Return the tokens of each document of a block.

        Returns:
            The documents, read-only; None if there is no entry, or if it is stale or damaged.
        """
        try:
            data = self.path(block).read_bytes()
        except OSError:
            return None
        entry = _unpack(data)
        if entry is None:
            _warn(f"Damaged entry of the token cache is ignored: {self.path(block)}")
            return None
        stored, documents = entry
        return documents if stored == stamp else None

    def write(self, block: int, stamp: str, documents: list[Tokens]) -> None:
        """Store the tokens of each document of a block; log errors of the file system once."""
        if not self._writes:
            return
        path = self.path(block)
        scratch = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk = shutil.disk_usage(path.parent)
            least = int(min(FREE_SHARE * disk.total, FREE_BYTES))
            if disk.free < least:
                raise OSError(f"{disk.free >> 20} MiB are free, and {least >> 20} MiB must stay so")
            scratch.write_bytes(_pack(stamp, documents))
            os.replace(scratch, path)
        except OSError as error:
            self._writes = False
            with suppress(OSError):
                scratch.unlink()
            why = error.strerror or error
            _warn(f"The token cache {self._folder} is not written any more: {why}")


class BlockRecorder:
    """Collects the tokens of one block, and writes them once all its documents have arrived."""

    def __init__(self, cache: TokenCache, block: int, stamp: str) -> None:
        self._cache = cache
        self._block = block
        self._stamp = stamp
        self._documents: list[Tokens] = []
        self._count: int | None = None

    def finish(self, count: int) -> None:
        """Set the number of the block's documents, one at least, before the last one is added."""
        self._count = count

    def add(self, tokens: Tokens) -> bool:
        """Append the next document; return whether the block is complete, and so written."""
        self._documents.append(tokens)
        if self._count != len(self._documents):
            return False
        self._cache.write(self._block, self._stamp, self._documents)
        return True


def _warn(text: str) -> None:
    logger.warning(text)


def _pack(stamp: str, documents: list[Tokens]) -> bytes:
    ends = np.cumsum([len(tokens) for tokens in documents], dtype="<i8")
    tokens = np.concatenate(documents) if documents else np.empty(0, dtype=np.int32)
    small = not len(tokens) or int(tokens.max()) < 1 << 16
    kind = "<u2" if small else "<u4"
    header = json.dumps({"stamp": stamp, "tokens": kind, "documents": len(ends)}).encode()
    rest = header + ends.tobytes() + tokens.astype(kind).tobytes()
    return _PREFIX.pack(MAGIC, zlib.crc32(rest), len(header)) + rest


def _unpack(data: bytes) -> tuple[str, list[Tokens]] | None:
    """Return the stamp and the documents, None for damaged bytes."""
    if len(data) < _PREFIX.size:
        return None
    magic, checksum, size = _PREFIX.unpack_from(data)
    rest = memoryview(data)[_PREFIX.size :]
    if magic != MAGIC or zlib.crc32(rest) != checksum:
        return None
    header = json.loads(bytes(rest[:size]))
    count = header["documents"]
    ends = np.frombuffer(rest, "<i8", count, offset=size)
    tokens = np.frombuffer(rest, header["tokens"], offset=size + ends.nbytes)
    starts = [0, *ends.tolist()]
    return header["stamp"], [tokens[a:b] for a, b in pairwise(starts)]
