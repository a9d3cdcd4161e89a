# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Reading files of a folder that somebody else may have made; needs no torch.

It can hold links elsewhere, pipes and devices that never end, and JSON of any size and depth.
"""

import errno
import hashlib
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from torchtitan_lr.config.paths import leads_out

MOST_BYTES = 1 << 28
"""Largest size of a file in bytes: the record of a long run's steps has tens of megabytes."""


@contextmanager
def open_regular(path: str | Path, most: int = MOST_BYTES) -> Iterator[BufferedReader]:
    """Open a file that ends, for reading; OSError for a pipe, a device, or over `most` bytes."""
    # Opening a pipe would wait for its writer without O_NONBLOCK.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
        yield file


def read_regular(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Read a file; errors as for `open_regular`."""
    with open_regular(path, most) as file:
        # Read no more than the stated size: files of /proc state none, and some never end.
        return file.read(os.fstat(file.fileno()).st_size)


SAMPLED_BYTES = 64 << 20  # bytes of some files that `sample_of` reads: all of small ones

_BLOCK = 1 << 14


def sample_of(files: Sequence[Path]) -> tuple[list[str], bool]:
    """Return a digest of each file's content, and whether all of it was read.

    Of files that are large together, blocks are read that lie evenly between first and last.
    """
    sizes = [file.stat().st_size for file in files]
    is_whole, digests = sum(sizes) <= SAMPLED_BYTES, list[str]()
    blocks = max(4, SAMPLED_BYTES // (_BLOCK * max(1, len(files))))
    for path, size in zip(files, sizes, strict=True):
        digest = hashlib.sha256(str(size).encode())
        with open_regular(path, sys.maxsize) as file:
            if is_whole or size <= blocks * _BLOCK:
                while piece := file.read(1 << 20):
                    digest.update(piece)
            else:
                for index in range(blocks):
                    file.seek((size - _BLOCK) * index // (blocks - 1))
                    digest.update(file.read(_BLOCK))
        digests.append(digest.hexdigest())
    return digests, is_whole


def read_json(path: str | Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object; ValueError if it is not UTF-8, JSON, an object, or too deeply nested."""
    return parse_json(read_regular(path, most).decode())


def parse_json(text: str) -> dict[str, Any]:
    """Return the JSON object of a text; errors as for `read_json`."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    return values


SEAL = "checksum"  # key of a record's own checksum


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return a record of JSON with a checksum of its content."""
    return content | {SEAL: _checksum(content)}


def unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without its checksum; other content raises a `ValueError`."""
    content = {key: value for key, value in record.items() if key != SEAL}
    if SEAL in record and record[SEAL] != _checksum(content):
        raise ValueError("it has another checksum than when it was written")
    return content


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def file_within(folder: Path, name: str) -> Path:
    """Return a file, links resolved, of a folder (maybe a link); OSError if it leads out."""
    try:
        home = folder.resolve()
        file = (home / name).resolve()
    except (RuntimeError, ValueError) as error:  # links in a circle; a null character
        raise OSError(errno.EINVAL, str(error), name) from error
    if leads_out(file, home):
        raise OSError(errno.EINVAL, "a link to outside of its folder: copy the file there", name)
    return file
