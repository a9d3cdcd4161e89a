# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Text to a prepared folder, unit by unit.

A unit is 64 MiB of a source's text in its order. It gives one shard of each part, and then its
record, ``unit-00017.json``: a unit with a record is there, any other is not. A preparation that was
killed reads its text from the beginning again, but tokenizes no unit that is there, which is all of
the work. ``corpus.json`` is written last, from the records.

The folder depends on the text and the tokenizer alone. So two machines that prepare one folder at
the same time, on a file system without locks, write the same bytes to the same places.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_lr.compat.interpreter import cores, ended_by_signals
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.log import say
from torchtitan_lr.console.progress import counting
from torchtitan_lr.data.corpus import (
    BEGUN,
    PARTS,
    Corpus,
    ShardInfo,
    save_record,
    write_over,
    write_shard,
)
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.sources import ONE_IN, Bad, Piece, Reader
from torchtitan_lr.data.template import ChatTemplate
from torchtitan_lr.data.tokenizer import Tokenizer, encode_documents, tokenizer_identity, vocabulary
from torchtitan_lr.errors import ConfigError, DataError, require

UNIT_BYTES = 64 << 20  # of text: some minutes of a core
LAST_SECONDS = 1.0  # for threads to end what they are at, when a preparation stops
MOST_BAD = 1000  # a preparation gives up after so many bad records above the allowed number

Arrays = list[npt.NDArray[Any]]
"""Lengths of documents, their tokens, and of pairs the loss mask."""

Unit = dict[str, Any]
"""The record of a unit: a `ShardInfo` or None for each of `PARTS`, the ``bad`` records with what
was expected, and the number of those that were ``changed``."""


class Encoded(NamedTuple):
    """The documents of a piece."""

    parts: list[Arrays]  # to train on and held out
    bad: list[Bad]


Work = tuple[int, Callable[[], Encoded]]
"""A piece: the number of its unit, and what returns its documents."""


def signature_of(readers: Sequence[Reader], tokenizer: Tokenizer) -> str:
    """Return a hash of all that determines a prepared folder."""
    sources = [reader.stamp for reader in readers]
    template = PairEncoder(tokenizer).digest if readers[0].pairs else ""
    text = json.dumps([4, ONE_IN, sources, tokenizer_identity(tokenizer), template])
    return hashlib.sha256(text.encode()).hexdigest()


def threads_of(readers: Sequence[Reader], tokenizer: Tokenizer) -> int:
    """Return how many threads encode beside the main one.

    None where a template may render chats, whose time is limited in the main thread.
    """
    return 0 if readers[0].pairs and ChatTemplate(tokenizer).digest else cores()


def tokenize(
    readers: Sequence[Reader],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    key: str,
    max_bad_records: int = 0,
) -> Corpus:
    """Prepare a folder, or go on with one; ``key`` is what set the folder, for errors.

    Raises:
        ConfigError: A source cannot be opened, texts and pairs together, a full disk, or no text.
        DataError: A file breaks off, or more records are lost than may be.
    """
    if len({reader.pairs for reader in readers}) > 1:
        named = next(str(reader.source) for reader in readers if reader.pairs)
        raise ConfigError(key, named, "sources that all hold text, or all hold pairs")
    if not readers[0].pairs and tokenizer.eos_id is None:
        where = tokenizer.tokenizer_path
        say(f"warning: no end of document: {where} has no eos_token in its tokenizer_config.json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _Preparation(readers, tokenizer, folder).run(max_bad_records)
    except OSError as error:
        want = f"a folder that can be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            want += "; what is written stays: the same command goes on where it was"
        raise ConfigError(key, str(folder), want) from error


class _Preparation:
    """One run of `tokenize`; see there."""

    def __init__(self, readers: Sequence[Reader], tokenizer: Tokenizer, folder: Path) -> None:
        self._readers, self._tokenizer, self._folder = readers, tokenizer, folder
        self._dtype = np.dtype("<u2" if vocabulary(tokenizer) < 1 << 16 else "<i4")
        self._pairs = PairEncoder(tokenizer) if readers[0].pairs else None
        self._signature = signature_of(readers, tokenizer)
        self._threads = threads_of(readers, tokenizer)
        # Before threads begin: each would find the limit, and change what others encode with.
        self._limits = [reader.limit for reader in readers]
        if not tokenizer.tokenizer.encode_special_tokens:
            tokenizer.tokenizer.encode_special_tokens = True
        begun: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            begun = read_json(folder / BEGUN)
        commits: Sequence[str | None] = begun.get("commits", ())
        if begun.get("signature") != self._signature:
            commits = ()
            for other in folder.glob("unit-*.json"):  # of another text or tokenizer
                other.unlink(missing_ok=True)
        for reader, commit in zip(readers, commits, strict=False):
            reader.commit = commit
        for reader in readers:
            reader.find_commit()
        begun = {"signature": self._signature, "commits": [reader.commit for reader in readers]}
        write_over(folder / BEGUN, json.dumps(begun).encode())
        self._there = list[Unit]()
        with suppress(OSError, ValueError):  # of the first one that is not there, or not whole
            while True:
                self._there.append(read_json(self._path(len(self._there))))

    def _path(self, number: int) -> Path:
        return self._folder / f"unit-{number:05d}.json"

    def run(self, most: int) -> Corpus:
        """Make the units that are not there, and the corpus; ``most`` records may be lost."""
        # Each thread encodes a piece alone: threads of a library do not survive a fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        units, bad = list[Unit](), list[list[str]]()
        with counting("preparing", None, "tokens") as done:
            for unit in self._units(done):
                units.append(unit)
                bad += unit["bad"]
                if len(bad) > most + MOST_BAD:
                    break
        if len(bad) > most:
            where, want = bad[0]
            want += f" (the first of {len(bad)} bad records; --max_bad_records or"
            want += f" training.max_bad_records = {len(bad)} leaves them out)"
            raise DataError(self._readers[0].source.key, where, want)
        return self._finished(units)

    def _units(self, done: Callable[[int], object]) -> Iterator[Unit]:
        """Yield all units."""
        number = 0
        for reader in self._readers:
            for unit in self._units_of(reader, number, done):
                yield unit
                number += 1

    def _units_of(
        self, reader: Reader, first: int, done: Callable[[int], object]
    ) -> Iterator[Unit]:
        """Yield the units of a source, whose first one has the number ``first``."""
        left = reader.source.tokens or math.inf
        part = "held_out" if reader.source.part == "held_out" else "train"  # counts for the limit
        with closing(self._pieces(reader, first)) as pieces:
            for number, group in groupby(pieces, itemgetter(0)):
                if number < len(self._there):
                    unit = self._there[number]
                else:
                    encoded = self._encoded(group, PARTS.index(part), left, done)
                    unit = self._write(number, encoded)
                yield unit
                left -= unit[part]["tokens"] if unit[part] else 0
                if left <= 0:
                    return

    def _encoded(
        self, group: Iterator[Work], part: int, most: float, done: Callable[[int], object]
    ) -> list[Encoded]:
        """Return the documents of a unit, up to the piece with which a part has ``most`` tokens."""
        found, counted = list[Encoded](), 0
        for _, encode in group:
            found.append(encode())
            counted += len(found[-1].parts[part][1])
            done(sum(len(arrays[1]) for arrays in found[-1].parts))
            if counted >= most:
                break
        return found

    def _pieces(self, reader: Reader, number: int) -> Generator[Work, None, None]:
        """Yield the pieces of a source, of which the first is in the unit of that number.

        Threads work ahead. A rule of a stranger's tokenizer may keep one for ever: no end waits
        for that.
        """
        ahead, size = deque[Work](), 0
        pool = ThreadPoolExecutor(self._threads or 1)
        given = deque[Future[Encoded]](maxlen=2 * cores() + 2)  # others are done
        try:
            for piece in reader.pieces():
                encode: Callable[[], Encoded] = partial(self._encode, reader, piece)
                if self._threads and number >= len(self._there):
                    given.append(pool.submit(encode))
                    encode = given[-1].result
                ahead.append((number, encode))
                size += piece.size
                if size >= UNIT_BYTES:
                    number, size = number + 1, 0
                if len(ahead) > 2 * cores():
                    yield ahead.popleft()
            yield from ahead
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            wait([each for each in given if not each.cancelled()], LAST_SECONDS)

    def _encode(self, reader: Reader, piece: Piece) -> Encoded:
        with ended_by_signals():  # a tokenizer's rule may never end
            return self._encoded_piece(reader, piece)

    def _encoded_piece(self, reader: Reader, piece: Piece) -> Encoded:
        parts, bad = reader.documents(piece)
        encoded = list[Arrays]()
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
        return Encoded(encoded, bad)

    def _write(self, number: int, encoded: Sequence[Encoded]) -> Unit:
        """Write a unit's shards, and then its record."""
        bad = [record for each in encoded for record in each.bad]
        lost = [[record.place, record.want] for record in bad if not record.replaced]
        unit: Unit = {"bad": lost, "changed": len(bad) - len(lost)}
        for index, part in enumerate(PARTS):
            arrays = zip(*(each.parts[index] for each in encoded), strict=True)
            lengths, *files = map(np.concatenate, arrays)
            named, unit[part] = dict(zip(("", ".loss"), files, strict=False)), None
            if len(lengths):
                shard = write_shard(self._folder, f"{part}-{number:05d}", lengths, named)
                unit[part] = asdict(shard)
        write_over(self._path(number), json.dumps(unit).encode())
        return unit

    def _finished(self, units: Sequence[Unit]) -> Corpus:
        """Write the record of the folder in the place of those of its units."""
        readers, own, first = self._readers, self._tokenizer, self._readers[0].source
        parts = [[ShardInfo(**unit[part]) for unit in units if unit[part]] for part in PARTS]
        require(any(parts), first.key, str(first), "a corpus with text in it")
        ends = {"bos": own.bos_id, "eos": own.eos_id, "vocabulary": vocabulary(own)}
        sources = [asdict(r.source) | {"files": len(r.files), "commit": r.commit} for r in readers]
        about = {
            "kind": "text" if self._pairs is None else "pairs",
            "tokenizer": {"sha256": tokenizer_identity(own)} | ends,
            "sources": sources,
            "held_out_share": [float(limit) / 2**64 for limit in self._limits],
            "signature": self._signature,
            "bad_records": [": expected ".join(bad) for unit in units for bad in unit["bad"]],
            "changed_records": sum(unit["changed"] for unit in units),
        }
        save_record(self._folder, about, parts)
        for number in range(len(units)):
            self._path(number).unlink(missing_ok=True)
        (self._folder / BEGUN).unlink(missing_ok=True)
        return Corpus.open(self._folder)
