# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Text to a prepared folder, unit by unit.

A unit is 64 MiB of a source's text in its order. It gives one shard of each part, and then its
record, ``unit-00017.json``: a unit with a record is there, any other is not. A preparation that was
killed reads its text from the beginning again, but tokenizes no unit that is there, which is all of
the work. ``corpus.json`` is written last, from the records.

The folder depends on the text and the tokenizer alone. So two machines that prepare one folder at
the same time, on a file system without locks, write the same bytes to the same places. A lock only
saves work.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from torchtitan_lr.compat.interpreter import cores, ended_by_signals
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.log import say
from torchtitan_lr.console.terminal import counting
from torchtitan_lr.data import corpus
from torchtitan_lr.data.corpus import BEGUN, PARTS, RECORD, Corpus, ShardInfo
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.sources import ONE_IN, Bad, Piece, Reader
from torchtitan_lr.data.tokenizer import Tokenizer, encode_documents, tokenizer_identity, vocabulary
from torchtitan_lr.errors import ConfigError, DataError, require

UNIT_BYTES = 64 << 20  # of text: some minutes of a core
LOCK = ".lock"  # file in a folder, locked by who prepares it

Unit = dict[str, Any]
"""The record of a unit: a `ShardInfo` or None for each of `PARTS`, and the ``bad`` records."""

Encoded = tuple[list[list[npt.NDArray[Any]]], list[Bad]]
"""The documents of a piece, to train on and held out, and its bad records. Arrays of a part are
lengths of documents, their tokens, and of pairs the loss mask."""


def signature_of(readers: Sequence[Reader], tokenizer: Tokenizer) -> str:
    """Return a hash of all that determines a prepared folder."""
    sources = [reader.stamp for reader in readers]
    template = PairEncoder(tokenizer).digest if readers[0].pairs else ""
    text = json.dumps([5, ONE_IN, sources, tokenizer_identity(tokenizer), template])
    return hashlib.sha256(text.encode()).hexdigest()


def prepare_folder(
    readers: Sequence[Reader],
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
    max_bad_records: int = 0,
) -> Corpus:
    """Prepare a folder, or go on with it, unless it is prepared; ``key`` is what set it.

    A second process waits for the first. What is there is read without a lock: it may be another
    user's. A ConfigError says what cannot be read, written or lost.
    """
    with ended_by_signals():  # a storage, or a rule of a stranger's tokenizer, may never end
        signature = signature_of(readers, tokenizer)
        if not (folder / RECORD).is_file():
            _require_free(folder, signature, key)
            with _written(folder, key), _alone(folder):
                if not (folder / RECORD).is_file():  # another run may have prepared it meanwhile
                    _require_free(folder, signature, key)  # or have begun it
                    _Preparation(readers, tokenizer, folder, signature).run(key, max_bad_records)
    found = Corpus.open(folder, key)
    want = "another folder: it was prepared from other sources, or with another tokenizer"
    require(found.record.get("signature") == signature, key, str(folder), want)
    lost = len(found.record["bad_records"])
    want = f"training.max_bad_records = {lost}: {folder / RECORD} lists what was left out"
    require(lost <= max_bad_records, "training.max_bad_records", max_bad_records, want)
    return found


def _require_free(folder: Path, signature: str, key: str) -> None:
    """Refuse a folder that holds anything but the begun preparation of a signature."""
    with suppress(OSError, ValueError):
        if read_json(folder / BEGUN).get("signature") == signature:
            return
    names = os.listdir(folder) if folder.is_dir() else []
    foreign = next((name for name in names if name not in (LOCK, BEGUN)), None)
    want = f"a folder that is new, empty or was begun by this command; it holds {foreign!r}"
    require(foreign is None, key, str(folder), want)


@contextmanager
def _written(folder: Path, key: str) -> Iterator[None]:
    """Refuse a folder that cannot be written, with the way out."""
    try:
        yield
    except OSError as error:
        want = f"a folder that can be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            want += "; what is written stays: the same command goes on where it was"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            want += f"; {key} can name another, or its owner runs the same command or `chmod g+w`"
        raise ConfigError(key, str(folder), want) from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder to prepare it; without a lock where its file system has none."""
    lock = FileLock(folder / LOCK)
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(NotImplementedError):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"waiting for another run, which prepares {folder}")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


class _Preparation:
    """The preparation of a folder by this process."""

    def __init__(
        self, readers: Sequence[Reader], tokenizer: Tokenizer, folder: Path, signature: str
    ) -> None:
        self._readers, self._tokenizer = readers, tokenizer
        self._folder, self._signature = folder, signature
        self._dtype = np.dtype("<u2" if vocabulary(tokenizer) < 1 << 16 else "<i4")
        self._pairs = PairEncoder(tokenizer) if readers[0].pairs else None
        # A template may render chats, whose time is limited in the main thread.
        self._in_threads = self._pairs is None or not self._pairs.digest
        self._there = list[Unit]()

    def run(self, key: str, most: int) -> None:
        """Make the units that are not there, and the record; ``most`` records may be lost."""
        readers, tokenizer = self._readers, self._tokenizer
        if len({reader.pairs for reader in readers}) > 1:
            named = next(str(reader.source) for reader in readers if reader.pairs)
            raise ConfigError(key, named, "sources that all hold text, or all hold pairs")
        where = tokenizer.tokenizer_path
        if self._pairs is None and tokenizer.eos_id is None:
            say(f"warning: no end of document: {where} has no eos_token in tokenizer_config.json")
        # Each thread encodes a piece alone: threads of a library do not survive a fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # Before threads begin: each would find the limit, and change what others encode with.
        limits = [reader.limit for reader in readers]
        if not tokenizer.tokenizer.encode_special_tokens:
            tokenizer.tokenizer.encode_special_tokens = True
        self._begin()
        units, bad = list[Unit](), list[list[str]]()
        totals = [reader.source.tokens or 0 for reader in readers]
        with counting("preparing", sum(totals) if all(totals) else None, "tokens") as done:
            for reader in readers:
                for unit in self._units_of(reader, len(units), done):
                    units.append(unit)
                    bad += unit["bad"]
                    if len(bad) > most:
                        place, want = bad[0]
                        want += f" (the first of {len(bad)} bad records so far; --max_bad_records"
                        want += f" or training.max_bad_records = {len(bad)} leaves them out)"
                        raise DataError(reader.source.key, place, want)
        self._finish(units, [": expected ".join(record) for record in bad], limits)

    def _begin(self) -> None:
        """Find what is there. A dataset of the Hub stays at the commit of the beginning."""
        with suppress(OSError, ValueError):
            begun = read_json(self._folder / BEGUN)
            if begun["signature"] == self._signature:  # else nothing else is there
                for reader, commit in zip(self._readers, begun["commits"], strict=True):
                    reader.commit = commit
        for reader in self._readers:
            reader.find_commit()
        commits = [reader.commit for reader in self._readers]
        begun = {"signature": self._signature, "commits": commits}
        corpus.write_over(self._folder / BEGUN, json.dumps(begun).encode())
        with suppress(OSError, ValueError):  # of the first one that is not there, or not whole
            while True:
                self._there.append(read_json(self._path(len(self._there))))

    def _path(self, number: int) -> Path:
        return self._folder / f"unit-{number:05d}.json"

    def _units_of(
        self, reader: Reader, first: int, done: Callable[[int], object]
    ) -> Iterator[Unit]:
        """Yield the units of a source, whose first one has the number ``first``."""
        left = reader.source.tokens or math.inf
        part = PARTS.index("held_out" if reader.source.part == "held_out" else "train")
        with closing(self._encoded(reader, first)) as pieces:
            for number, group in groupby(pieces, itemgetter(0)):
                if number < len(self._there):
                    unit = self._there[number]
                else:
                    # Up to the piece with which the part has as many tokens as are wanted.
                    found, counted = list[Encoded](), 0
                    for _, future in group:
                        found.append(future.result())
                        tokens = [len(arrays[1]) for arrays in found[-1][0]]
                        done(sum(tokens))
                        counted += tokens[part]
                        if counted >= left:
                            break
                    unit = self._write(number, found)
                yield unit
                left -= unit[PARTS[part]]["tokens"] if unit[PARTS[part]] else 0
                if left <= 0:
                    return

    def _encoded(
        self, reader: Reader, number: int
    ) -> Generator[tuple[int, Future[Encoded]], None, None]:
        """Yield the pieces of a source, of which the first is in the unit of that number.

        Threads work ahead; pieces of units that are there are not encoded.
        """
        ahead, size = deque[tuple[int, Future[Encoded]]](), 0
        pool = ThreadPoolExecutor(cores())
        try:
            for piece in reader.pieces():
                future = Future[Encoded]()
                if number >= len(self._there) and self._in_threads:
                    future = pool.submit(self._encode, reader, piece)
                elif number >= len(self._there):
                    future.set_result(self._encode(reader, piece))
                ahead.append((number, future))
                size += piece.size
                if size >= UNIT_BYTES:
                    number, size = number + 1, 0
                if len(ahead) > 2 * cores():
                    yield ahead.popleft()
            yield from ahead
        finally:
            pool.shutdown(cancel_futures=True)

    def _encode(self, reader: Reader, piece: Piece) -> Encoded:
        parts, bad = reader.documents(piece)
        encoded = list[list[npt.NDArray[Any]]]()
        for documents in parts:
            if self._pairs is None:
                found = encode_documents(self._tokenizer, documents)
            else:
                found = [self._pairs.encode(document) for document in documents]
            lengths = np.array([len(tokens) for tokens in found], dtype="<i4")
            joined = np.concatenate([np.empty(0, dtype=np.int32), *found])
            # Complements are tokens of prompts (`data.pairs`).
            is_target = joined >= 0
            tokens = np.where(is_target, joined, ~joined).astype(self._dtype)
            mask = [] if self._pairs is None else [is_target.astype(np.uint8)]
            encoded.append([lengths, tokens, *mask])
        return encoded, bad

    def _write(self, number: int, encoded: Sequence[Encoded]) -> Unit:
        """Write a unit's shards, and then its record."""
        unit: Unit = {"bad": []}
        for _, bad in encoded:
            unit["bad"] += map(list, bad)
        for index, part in enumerate(PARTS):
            pieces = [parts[index] for parts, _ in encoded]
            lengths, *files = [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
            unit[part] = None
            if len(lengths):
                by_suffix = dict(zip(("", ".loss"), files, strict=False))
                name = f"{part}-{number:05d}"
                unit[part] = asdict(corpus.write_shard(self._folder, name, lengths, by_suffix))
        corpus.write_over(self._path(number), json.dumps(unit).encode())
        return unit

    def _finish(self, units: Sequence[Unit], bad: list[str], limits: Sequence[int]) -> None:
        """Write the record of the folder in the place of those of its units."""
        own, first = self._tokenizer, self._readers[0].source
        parts = list[list[ShardInfo]]()
        for part in PARTS:
            parts.append([ShardInfo(**unit[part]) for unit in units if unit[part]])
        require(any(parts), first.key, str(first), "a corpus with text in it")
        sources = list[dict[str, Any]]()
        for reader in self._readers:
            counted = {"files": len(reader.files), "commit": reader.commit}
            sources.append(asdict(reader.source) | counted)
        ends = {"bos": own.bos_id, "eos": own.eos_id, "vocabulary": vocabulary(own)}
        about = {
            "kind": "text" if self._pairs is None else "pairs",
            "tokenizer": {"sha256": tokenizer_identity(own)} | ends,
            "sources": sources,
            "held_out_share": [float(limit) / 2**64 for limit in limits],
            "signature": self._signature,
            "bad_records": bad,
        }
        corpus.save_record(self._folder, about, parts)
        for number in range(len(units)):
            self._path(number).unlink(missing_ok=True)
        (self._folder / BEGUN).unlink(missing_ok=True)
