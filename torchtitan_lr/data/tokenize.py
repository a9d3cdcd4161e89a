# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Text to a prepared folder: one process reads and writes, the others decode and tokenize.

Pieces go out and come back in the order of the source, so the folder does not depend on the number
of processes. Every two seconds the written tokens are synchronized, and then a journal records how
many there are and where reading goes on: a killed preparation continues there, and its folder is
that of one that was never killed. Memory holds a few pieces per process, whatever the source.
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.compat.interpreter import end_with
from torchtitan_lr.data.corpus import PARTS, Corpus, Kind, save_record, write_json
from torchtitan_lr.data.indexed import IndexedWriter
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.sources import ONE_IN, Bad, Piece, Reader, Source
from torchtitan_lr.data.tokenizer import encode_documents, tokenizer_identity, vocabulary
from torchtitan_lr.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

JOURNAL = "preparing.json"
BAD_RECORDS = "bad_records.txt"

SHARD_BYTES = 4 << 30  # of tokens, after which a shard ends: 250 shards in a terabyte
MOST_LISTED = 1000  # bad records beyond those that may be lost, before a preparation gives up
SYNC_SECONDS = 2.0

Arrays = list[npt.NDArray[Any]]
"""Tokens, lengths of documents, and of pairs the loss mask."""

Encoded = tuple[tuple[Arrays, Arrays], list[Bad]]
"""To train on and held out; and the records that cannot be read."""


@dataclass
class Journal:
    """How far a preparation is."""

    signature: str  # of sources and tokenizer
    source: int = 0  # index of the one that is read
    position: Any = None  # where to read on in it; None for its beginning
    tokens: int = 0  # of it so far, as far as they count for its limit
    shards: list[list[list[int]]] = field(default_factory=lambda: [[], []])
    """Documents and tokens of each shard, by part."""
    bad: list[list[str]] = field(default_factory=list)  # the records that cannot be read
    commits: list[str | None] = field(default_factory=list)  # of each source; None if not known

    @staticmethod
    def load(folder: Path, signature: str) -> Journal:
        """Read it; a new one where there is none, or of other sources."""
        with suppress(OSError, ValueError, TypeError):
            found = Journal(**json.loads((folder / JOURNAL).read_text()))
            if found.signature == signature:
                return found
        return Journal(signature)


def signature_of(readers: Sequence[Reader], tokenizer: HuggingFaceTokenizer) -> str:
    """Return a hash of all that determines a prepared folder."""
    sources = [reader.stamp() for reader in readers]
    template = PairEncoder(tokenizer).digest if readers[0].pairs else ""
    text = json.dumps([1, ONE_IN, sources, tokenizer_identity(tokenizer), template])
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize(
    readers: Sequence[Reader],
    tokenizer: HuggingFaceTokenizer,
    folder: Path,
    *,
    key: str,
    workers: int | None = None,
    max_bad_records: int = 0,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int, int, float | None], None] | None = None,
) -> Corpus:
    """Prepare a folder, or go on with one.

    Args:
        readers: The sources, in order.
        tokenizer: Encodes their documents.
        folder: Where to write; created if needed, and used by no other process.
        key: What set the folder, to name in errors.
        workers: Processes that tokenize; one per core by default.
        max_bad_records: Records that may be lost.
        shard_bytes: Bytes of tokens after which a shard ends.
        report: Takes the documents and the tokens so far, and the share of the work that is done,
            if known; called after every piece.

    Raises:
        ConfigError: A source cannot be opened, texts and pairs together, a full disk, or no text.
        DataError: A file breaks off, or more records are lost than may be.
    """
    if len({reader.pairs for reader in readers}) > 1:
        named = next(str(reader.source) for reader in readers if reader.pairs)
        raise ConfigError(key, named, "sources that all hold text, or all hold pairs")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or cores or 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with closing(_Preparation(readers, tokenizer, folder, workers, shard_bytes)) as work:
            work.run(max_bad_records, report)
            return work.finish()
    except BrokenProcessPool as error:
        want = "one that lives: it was killed, probably for memory; try fewer"
        raise ConfigError("workers", workers, want) from error
    except OSError as error:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "; what is written stays: the same command goes on where it was"
        want = f"a folder that can be written ({error.strerror or error}){hint}"
        raise ConfigError(key, str(folder), want) from error


class _Preparation:
    """One run of :func:`tokenize`; see there."""

    def __init__(
        self,
        readers: Sequence[Reader],
        tokenizer: HuggingFaceTokenizer,
        folder: Path,
        workers: int,
        shard_bytes: int,
    ) -> None:
        self._readers, self._tokenizer, self._folder = readers, tokenizer, folder
        self._journal = Journal.load(folder, signature_of(readers, tokenizer))
        dtype: npt.DTypeLike = np.uint16 if vocabulary(tokenizer) < 1 << 16 else np.int32
        kinds = [("", dtype)] + [(".loss", np.uint8)] * readers[0].pairs
        most = shard_bytes // np.dtype(dtype).itemsize
        self._parts = [
            _Shards(folder / part, kinds, most, counts)
            for part, counts in zip(PARTS, self._journal.shards, strict=True)
        ]
        for reader, commit in zip(readers, self._journal.commits, strict=False):
            reader.commit = commit
        self._limits = [reader.limit for reader in readers]  # before the fork: all need it
        # Forked, so that no process imports or reads anything again.
        context = multiprocessing.get_context("fork")
        work = (readers, tokenizer, dtype, os.getpid())
        self._pool, self._workers = ProcessPoolExecutor(workers, context, _begin, work), workers

    def run(self, most: int, report: Callable[[int, int, float | None], None] | None) -> None:
        """Read, tokenize and write everything; ``most`` records may be lost."""
        journal, due = self._journal, time.monotonic() + SYNC_SECONDS
        for source, piece, encoded in self._encoded():
            parts, bad = encoded.result()
            for part, arrays in zip(self._parts, parts, strict=True):
                part.append(arrays)
            journal.tokens += len(parts[source.part == "held_out"][0])
            journal.position = piece.position
            journal.bad += map(list, bad)
            if len(journal.bad) > most + MOST_LISTED:
                break
            if report:
                documents, tokens = np.sum([[0, 0], *journal.shards[0], *journal.shards[1]], axis=0)
                shares = [piece.share] if piece.share is not None else []
                shares += [journal.tokens / source.tokens] if source.tokens else []
                share = (journal.source + max(shares)) / len(self._readers) if shares else None
                report(int(documents), int(tokens), share)
            if time.monotonic() > due:
                self._sync()
                due = time.monotonic() + SYNC_SECONDS
        self._sync()
        if (count := len(journal.bad)) > most:
            listed = self._folder / BAD_RECORDS
            listed.write_text("".join(f"{where}: expected {want}\n" for where, want in journal.bad))
            where, want = journal.bad[0]
            want += f" ({count} records, listed in {listed}; --max_bad_records or"
            want += f" training.max_bad_records = {count} leaves them out)"
            raise DataError(self._readers[0].source.key, where, want)

    def _encoded(self) -> Iterator[tuple[Source, Piece, Future[Encoded]]]:
        """Yield the pieces that are left, in order, while the processes are some ahead."""
        journal = self._journal
        for index in range(journal.source, len(self._readers)):
            if index > journal.source:
                journal.source, journal.position, journal.tokens = index, None, 0
            source = self._readers[index].source
            pieces = self._readers[index].pieces(journal.position)
            ahead: deque[tuple[Source, Piece, Future[Encoded]]] = deque()
            while source.tokens is None or journal.tokens < source.tokens:
                # So far ahead that no process waits while this one waits for the disk.
                for piece in islice(pieces, 4 * self._workers + 1 - len(ahead)):
                    ahead.append((source, piece, self._pool.submit(_encode, index, piece)))
                if not ahead:
                    break
                yield ahead.popleft()

    def _sync(self) -> None:
        for writer in (writer for part in self._parts for writer in part.open):
            writer.flush()
        self._journal.commits = [reader.commit for reader in self._readers]
        write_json(self._folder / JOURNAL, asdict(self._journal))

    def finish(self) -> Corpus:
        """Write the indices and the record."""
        for part in self._parts:
            part.finish()
        first, journal = self._readers[0], self._journal
        if not any(journal.shards):
            raise ConfigError(first.source.key, str(first.source), "a corpus with text in it")
        tokenizer = {
            "sha256": tokenizer_identity(self._tokenizer),
            "bos": getattr(self._tokenizer, "bos_id", None),
            "eos": self._tokenizer.eos_id,
            "vocabulary": vocabulary(self._tokenizer),
        }
        more = {
            "sources": [
                asdict(reader.source) | {"files": len(reader.files), "commit": reader.commit}
                for reader in self._readers
            ],
            "held_out_share": [float(limit) / 2**64 for limit in self._limits],
            "signature": journal.signature,
            "bad_records": [f"{where}: expected {want}" for where, want in journal.bad],
        }
        kind: Kind = "pairs" if first.pairs else "text"
        corpus = save_record(self._folder, kind, tokenizer, journal.shards, more, self._pool.map)
        for scratch in (*self._folder.glob("*.lengths"), self._folder / JOURNAL):
            scratch.unlink()
        return corpus

    def close(self) -> None:
        """End the processes, and close the files as they are."""
        self._pool.shutdown(cancel_futures=True)
        for writer in (writer for part in self._parts for writer in part.open):
            with suppress(OSError):  # a full disk, reported already
                writer.close()


@dataclass
class _Shards:
    """The shards of a part, written one after another."""

    prefix: Path  # of all of them, without the number
    kinds: list[tuple[str, Any]]  # suffix and type of the files of each
    most: int  # tokens after which one ends
    counts: list[list[int]]  # documents and tokens of each so far; kept up to date
    open: list[IndexedWriter] = field(default_factory=list)  # of the last one

    def append(self, arrays: Arrays) -> None:
        """Append documents."""
        tokens, lengths, *mask = arrays
        if not len(lengths):
            return
        if not self.counts or self.counts[-1][1] >= self.most:
            self.finish()
            self.counts.append([0, 0])
        for writer, values in zip(self._writers(), [tokens, *mask], strict=True):
            writer.append(values, lengths)
        documents, written = self.counts[-1]
        self.counts[-1] = [documents + len(lengths), written + len(tokens)]

    def _writers(self) -> list[IndexedWriter]:
        """Open the last shard if it is not open, behind what it has."""
        if not self.open and self.counts:
            prefix, counts = f"{self.prefix}-{len(self.counts) - 1:05d}", self.counts[-1]
            self.open = [IndexedWriter(prefix + end, kind, *counts) for end, kind in self.kinds]
        return self.open

    def finish(self) -> None:
        """End the last shard; all of it may be from a process that was killed."""
        for writer in self._writers():
            writer.finish()
        self.open = []


_work: Any = None
"""Of a process of the pool: readers, tokenizer, type of the tokens, and the encoder of pairs."""


def _begin(
    readers: Sequence[Reader], tokenizer: HuggingFaceTokenizer, dtype: npt.DTypeLike, parent: int
) -> None:
    """Set up a process that tokenizes, in one thread: there is one per core."""
    global _work
    _work = readers, tokenizer, dtype, PairEncoder(tokenizer) if readers[0].pairs else None
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(index: int, piece: Piece) -> Encoded:
    """Decode and tokenize a piece of a source."""
    readers, tokenizer, dtype, pairs = _work
    texts: tuple[list[str], list[str]] = ([], [])
    bad: list[Bad] = []
    for found in readers[index].documents(piece):
        if isinstance(found, Bad):
            bad.append(found)
        else:
            texts[found[1]].append(found[0])

    def arrays(documents: list[str]) -> Arrays:
        if pairs is None:
            found = encode_documents(tokenizer, documents)
        else:
            found = [pairs.encode(document) for document in documents]
        lengths = np.array([len(tokens) for tokens in found], dtype=np.int32)
        joined = np.concatenate([np.empty(0, dtype=np.int32), *found])
        # Complements are tokens of prompts (`data.pairs`).
        is_target = joined >= 0
        tokens = np.where(is_target, joined, ~joined).astype(dtype)
        return [tokens, lengths] + [is_target.astype(np.uint8)] * (pairs is not None)

    return (arrays(texts[0]), arrays(texts[1])), bad
