# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Text to a prepared folder: one process reads and writes, a pool decodes and tokenizes.

Pieces go out and come back in the order of the source, so the folder does not depend on the number
of processes. Every two seconds the tokens are written, and then a journal records how many there
are and where reading goes on: a killed preparation continues there, and its folder is that of one
that was never killed. Memory holds a few pieces per process and these tokens, whatever the source.

The journal is written before anything else, so a folder without one is not ours, and its digest
finds a changed byte. Locks keep two processes apart (:mod:`torchtitan_lr.data.prepare`); where none
work, a process that finds the journal of another one stops before it writes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import multiprocessing
import os
import re
import resource
import secrets
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
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.compat.interpreter import cores, end_with
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.log import say
from torchtitan_lr.data.corpus import JOURNAL, PARTS, Corpus, save_record, write_index
from torchtitan_lr.data.pairs import PairEncoder
from torchtitan_lr.data.sources import ONE_IN, Bad, Piece, Reader, Source
from torchtitan_lr.data.tokenizer import Tokenizer, encode_documents, tokenizer_identity, vocabulary
from torchtitan_lr.errors import ConfigError, DataError, require

BAD_RECORDS = "bad_records.txt"
SHARD_FILE = re.compile(rf"({'|'.join(PARTS)})-\d{{5}}(\.loss)?\.(bin|idx|lengths)")

SHARD_BYTES = 4 << 30  # of tokens, after which a shard ends: 250 shards in a terabyte
MOST_LISTED = 1000  # a preparation gives up after so many bad records above the allowed number
SYNC_SECONDS = 2.0
PIECE_SECONDS = 900
"""Seconds after which the process of a piece is ended: some tokenizers' rules never end."""

LEAST_MEMORY = 4 << 30  # bytes that each process may take, also where the machine has fewer

Arrays = list[npt.NDArray[Any]]
"""Lengths of documents, their tokens, and of pairs the loss mask."""

Report = Callable[[int, int, float | None], None]
"""Takes the documents and the tokens so far, and the share of the work that is done, if known."""

Encoded = tuple[list[Arrays], list[Bad]]
"""To train on and held out; and the records that cannot be read."""

_work: Any = None
"""State of a process of the pool: readers, tokenizer, type of the tokens, encoder of pairs."""


@dataclass
class Journal:
    """How far a preparation is."""

    signature: str  # of sources and tokenizer
    source: int = 0  # index of the one that is read
    position: Any = None  # where to read on in the file; None for its beginning
    tokens: int = 0  # of the source so far, as far as they count for its limit
    shards: list[list[list[int]]] = field(default_factory=lambda: [[], []])
    """Documents and tokens of each shard, by part."""
    bad: list[list[str]] = field(default_factory=list)  # the records that are left out
    replaced: int = 0  # records of which a part is replaced
    replaced_first: list[list[str]] = field(default_factory=list)
    commits: list[str | None] = field(default_factory=list)  # of each source; None if not known
    owner: str = ""  # of the process that writes it

    @staticmethod
    def load(folder: Path, signature: str) -> Journal:
        """Read it; a new one where there is none, or one that is damaged or of other sources."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = read_json(folder / JOURNAL)
            if found.pop("digest") == _digest(found) and found["signature"] == signature:
                return Journal(**found)
        return Journal(signature)

    def save(self, folder: Path) -> None:
        """Write it, until it is on the disk."""
        record = asdict(self)
        write_whole(folder / JOURNAL, json.dumps(record | {"digest": _digest(record)}, indent=1))

    def add_bad(self, bad: Sequence[Bad]) -> None:
        """Count records that are left out or changed."""
        for record in bad:
            if not record.replaced:
                self.bad.append([record.place, record.want])
                continue
            self.replaced += 1
            if len(self.replaced_first) < MOST_LISTED:
                self.replaced_first.append([record.place, record.want])


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def signature_of(readers: Sequence[Reader], tokenizer: Tokenizer) -> str:
    """Return a hash of all that determines a prepared folder."""
    sources = [reader.stamp for reader in readers]
    template = PairEncoder(tokenizer).digest if readers[0].pairs else ""
    # 2: names of special tokens in a document are text; labels of chats are transformers'; bytes
    # that are no UTF-8 are not replaced, and the mark at the beginning of .txt is no text.
    # 3: a sample of the text itself, and no version of a library.
    text = json.dumps([3, ONE_IN, sources, tokenizer_identity(tokenizer), template])
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize(
    readers: Sequence[Reader],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    key: str,
    workers: int | None = None,
    max_bad_records: int = 0,
    report: Report | None = None,
) -> Corpus:
    """Prepare a folder, or go on with one.

    Args:
        readers: The sources, in order.
        tokenizer: Encodes their documents.
        folder: The folder to write; created if needed. No other process may use it.
        key: The key or option that set the folder, for errors.
        workers: Processes that tokenize; one per core by default.
        max_bad_records: Records that may be lost.
        report: Called after every piece.

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
    workers = workers or cores()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with closing(_Preparation(readers, tokenizer, folder, workers, key)) as work:
            work.run(max_bad_records, report)
            return work.finish()
    except OSError as error:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "; what is written stays: the same command goes on where it was"
        want = f"a folder that can be written ({error.strerror or error}){hint}"
        raise ConfigError(key, str(folder), want) from error


class _Preparation:
    """One run of :func:`tokenize`; see there."""

    def __init__(
        self, readers: Sequence[Reader], tokenizer: Tokenizer, folder: Path, workers: int, key: str
    ) -> None:
        self._readers, self._tokenizer, self._folder, self._key = readers, tokenizer, folder, key
        self._journal = Journal.load(folder, signature_of(readers, tokenizer))
        dtype = np.dtype("<u2" if vocabulary(tokenizer) < 1 << 16 else "<i4")
        types = {"": dtype} | ({".loss": np.dtype(np.uint8)} if readers[0].pairs else {})
        self._parts = [
            _Shards(folder / part, types, SHARD_BYTES // dtype.itemsize, counts)
            for part, counts in zip(PARTS, self._journal.shards, strict=True)
        ]
        begun = (folder / JOURNAL).is_file()
        if begun and (not self._journal.owner or not all(part.is_whole() for part in self._parts)):
            say(f"starting over in {folder}: what it has is of other sources, or damaged")
            self._start_over()
        self._journal.owner = secrets.token_hex(8)
        self._journal.save(folder)
        for reader, commit in zip(readers, self._journal.commits, strict=False):
            reader.commit = commit
        self._limits = [reader.limit for reader in readers]  # before the fork: all need it
        # Forked, so that no process imports or reads anything again.
        context = multiprocessing.get_context("fork")
        pairs = PairEncoder(tokenizer) if readers[0].pairs else None
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = max(LEAST_MEMORY, machine // workers)
        work = (os.getpid(), memory, readers, tokenizer, dtype, pairs)
        self._pool, self._workers = ProcessPoolExecutor(workers, context, _begin, work), workers

    def run(self, most: int, report: Report | None) -> None:
        """Read, tokenize and write everything; ``most`` records may be lost."""
        journal, due = self._journal, time.monotonic() + SYNC_SECONDS
        for source, piece, encoded in self._encoded():
            try:
                parts, bad = encoded.result()
            except (BrokenProcessPool, MemoryError) as error:
                want = "one that lives: it was killed, for memory (try fewer) or after"
                want += f" {PIECE_SECONDS} s with one piece of text, near {piece.file}:{piece.line}"
                raise ConfigError("workers", self._workers, want) from error
            for part, arrays in zip(self._parts, parts, strict=True):
                part.append(arrays)
            journal.tokens += len(parts[source.part == "held_out"][1])
            journal.position = piece.position
            journal.add_bad(bad)
            if len(journal.bad) > most + MOST_LISTED:
                break
            if report:
                documents, tokens = np.sum([[0, 0], *journal.shards[0], *journal.shards[1]], axis=0)
                done = max(piece.share, journal.tokens / (source.tokens or math.inf))
                share = (journal.source + done) / len(self._readers)
                report(int(documents), int(tokens), share or None)
            if time.monotonic() > due:
                self._sync()
                due = time.monotonic() + SYNC_SECONDS
        self._sync()
        if (count := len(journal.bad)) > most:
            listed = self._folder / BAD_RECORDS
            listed.write_text("".join(f"{line}\n" for line in _listed(journal.bad)))
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
        found = dict[str, Any]()
        with suppress(OSError, ValueError):
            found = read_json(self._folder / JOURNAL)
        want = "a folder that no other process prepares or deletes meanwhile"
        require(found.get("owner") == self._journal.owner, self._key, str(self._folder), want)
        for part in self._parts:
            if part.waiting:
                part.write()
        self._journal.commits = [reader.commit for reader in self._readers]
        self._journal.save(self._folder)

    def _start_over(self) -> None:
        """Delete what a preparation has written; its journal is written anew."""
        for file in self._folder.iterdir():
            if SHARD_FILE.fullmatch(file.name):
                file.unlink()
        self._journal = Journal(self._journal.signature)
        for part, counts in zip(self._parts, self._journal.shards, strict=True):
            part.counts = counts

    def finish(self) -> Corpus:
        """Write the indices and the record."""
        for part in self._parts:
            part.finish()
        readers, own, journal = self._readers, self._tokenizer, self._journal
        first = readers[0].source
        require(any(journal.shards), first.key, str(first), "a corpus with text in it")
        ends = {"bos": own.bos_id, "eos": own.eos_id, "vocabulary": vocabulary(own)}
        sources = [asdict(r.source) | {"files": len(r.files), "commit": r.commit} for r in readers]
        about = {
            "kind": "pairs" if readers[0].pairs else "text",
            "tokenizer": {"sha256": tokenizer_identity(own)} | ends,
            "sources": sources,
            "held_out_share": [float(limit) / 2**64 for limit in self._limits],
            "signature": journal.signature,
            "bad_records": _listed(journal.bad),
            "replaced": {"records": journal.replaced, "first": _listed(journal.replaced_first)},
        }
        corpus = save_record(self._folder, about, journal.shards)
        for part in self._parts:
            for index in range(len(part.counts)):
                Path(f"{part.prefix}-{index:05d}.lengths").unlink()
        (self._folder / BAD_RECORDS).unlink(missing_ok=True)
        (self._folder / JOURNAL).unlink()
        return corpus

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


def _listed(bad: list[list[str]]) -> list[str]:
    return [f"{place}: expected {want}" for place, want in bad]


@dataclass
class _Shards:
    """The shards of a part, written one after another.

    Beside its tokens the last one has the lengths of its documents, from which its index is made.
    """

    prefix: Path  # of all of them, without the number
    types: dict[str, np.dtype[Any]]  # of the tokens and of the mask, by the ends of their names
    most: int  # tokens after which one ends
    counts: list[list[int]]  # documents and tokens of each so far; kept up to date
    waiting: list[Arrays] = field(default_factory=list)  # of the last one, not yet written

    def is_whole(self) -> bool:
        """Return whether the files have what the counts say; a killed process may leave more."""
        for index, (documents, tokens) in enumerate(self.counts):
            prefix = f"{self.prefix}-{index:05d}"
            try:
                lengths = np.fromfile(f"{prefix}.lengths", "<i4", documents)
                sizes = {
                    os.path.getsize(f"{prefix}{end}.bin") // kind.itemsize
                    for end, kind in self.types.items()
                }
            except OSError:
                return False
            if (len(lengths), lengths.sum()) != (documents, tokens) or min(sizes) < tokens:
                return False
        return True

    def append(self, arrays: Arrays) -> None:
        """Add documents, which are written with the next ones."""
        if not len(arrays[0]):
            return
        if not self.counts or self.counts[-1][1] >= self.most:
            self.finish()
            self.counts.append([0, 0])
        self.waiting.append(arrays)
        self.counts[-1][0] += len(arrays[0])
        self.counts[-1][1] += len(arrays[1])

    def write(self) -> str:
        """Write what waits, until it is on the disk; return the prefix of the last shard.

        It stands behind what was written before: a killed process may have left more.
        """
        prefix = f"{self.prefix}-{len(self.counts) - 1:05d}"
        sizes = {".lengths": 4} | {f"{end}.bin": kind.itemsize for end, kind in self.types.items()}
        for index, (end, size) in enumerate(sizes.items()):
            new = [arrays[index] for arrays in self.waiting]
            with open(prefix + end, "ab") as file:
                file.truncate(size * (self.counts[-1][index > 0] - sum(map(len, new))))
                for values in new:
                    file.write(values.data)
                file.flush()
                os.fsync(file.fileno())
        self.waiting = []
        return prefix

    def finish(self) -> None:
        """End the last shard, which a killed process may have written."""
        if self.counts:
            prefix = self.write()
            lengths = np.fromfile(f"{prefix}.lengths", dtype="<i4")
            for end, kind in self.types.items():
                write_index(prefix + end, kind, lengths)


def _begin(parent: int, memory: int, *work: Any) -> None:
    """Set up a process that tokenizes, in one thread: there is one per core."""
    global _work
    _work = work
    end_with(parent)
    # A normalizer can make a text grow without end: this process then ends, and not the machine.
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent ends the processes
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(index: int, piece: Piece) -> Encoded:
    """Decode and tokenize a piece of a source."""
    readers, tokenizer, dtype, pairs = _work
    signal.alarm(PIECE_SECONDS)  # the kernel ends this process then, in whatever code it is
    parts, bad = readers[index].documents(piece)
    encoded: list[Arrays] = []
    for documents in parts:
        found = [*map(pairs.encode, documents)] if pairs else encode_documents(tokenizer, documents)
        lengths = np.array([len(tokens) for tokens in found], dtype="<i4")
        joined = np.concatenate([np.empty(0, dtype=np.int32), *found])
        # Complements are tokens of prompts (`data.pairs`).
        is_target = joined >= 0
        tokens = np.where(is_target, joined, ~joined).astype(dtype)
        encoded.append([lengths, tokens] + [is_target.astype(np.uint8)] * (pairs is not None))
    signal.alarm(0)
    return encoded, bad
