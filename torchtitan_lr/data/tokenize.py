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
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.compat.interpreter import end_with
from torchtitan_lr.data.corpus import (
    PARTS,
    Corpus,
    Kind,
    ShardInfo,
    checksum,
    save_record,
    write_json,
)
from torchtitan_lr.data.indexed import IndexedWriter
from torchtitan_lr.data.pairs import ChatTemplate, PairEncoder, Tokens
from torchtitan_lr.data.sources import ONE_IN, Bad, Piece, Reader
from torchtitan_lr.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

JOURNAL = "preparing.json"
BAD_RECORDS = "bad_records.txt"

SHARD_BYTES = 4 << 30
"""Bytes of tokens after which a shard ends: 250 shards in a terabyte."""

MOST_LISTED = 1000
"""Records that are listed beyond those that may be lost, before a preparation gives up."""

SYNC_SECONDS = 2.0

Arrays = list[npt.NDArray[Any]]

Report = Callable[[int, int, float | None], None]
"""Takes the documents and the tokens so far, and the share of the work that is done, if known."""


Encoded = tuple[tuple[Arrays, Arrays], list[Bad]]
"""For training and held out: the tokens, the lengths of documents, and of pairs the loss mask; and
the records that cannot be read."""


@dataclass
class Journal:
    """How far a preparation is.

    Attributes:
        signature: Of sources and tokenizer.
        source: Index of the source that is read.
        position: Where to read on in it; None for its beginning.
        shards: Documents and tokens of each shard, by part.
        tokens: Tokens of the source so far that count for its limit.
        bad: The records that cannot be read.
        read: Bytes of the files read, on disk.
        commits: The commit of each source on the Hub that was opened, by its index.
    """

    signature: str
    source: int = 0
    position: Any = None
    shards: list[list[list[int]]] = field(default_factory=lambda: [[], []])
    tokens: int = 0
    bad: list[list[str]] = field(default_factory=list)
    read: int = 0
    commits: dict[str, str | None] = field(default_factory=dict)

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
    template = ChatTemplate(tokenizer).digest if readers[0].pairs else ""
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
    report: Report | None = None,
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
        report: Called after every piece.

    Raises:
        ConfigError: A source cannot be opened, texts and pairs together, a full disk, or no text.
        DataError: A file breaks off, or more records are lost than may be.
    """
    if len({reader.pairs for reader in readers}) > 1:
        named = next(str(reader.source) for reader in readers if reader.pairs)
        raise ConfigError(key, named, "sources that all hold text, or all hold pairs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal.load(folder, signature_of(readers, tokenizer))
        return _Preparation(readers, tokenizer, folder, journal, shard_bytes, workers).run(
            max_bad_records, report
        )
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
        journal: Journal,
        shard_bytes: int,
        workers: int | None,
    ) -> None:
        self._readers, self._tokenizer, self._folder = readers, tokenizer, folder
        self._kind: Kind = "pairs" if readers[0].pairs else "text"
        self._journal = journal
        dtype: npt.DTypeLike = np.uint16 if vocabulary(tokenizer) < 1 << 16 else np.int32
        kinds = [("", dtype)] + [(".loss", np.uint8)] * (self._kind == "pairs")
        self._parts = [
            _Shards(folder / part, kinds, counts, shard_bytes)
            for part, counts in zip(PARTS, journal.shards, strict=True)
        ]
        for index, reader in enumerate(readers):
            reader.commit = journal.commits.get(str(index))
            _ = reader.limit  # before the processes are forked, which all need it
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._workers = workers or cores or 1
        # Forked, so that no process imports or reads anything again.
        self._pool = ProcessPoolExecutor(
            self._workers,
            multiprocessing.get_context("fork"),
            initializer=_begin,
            initargs=(_Work(readers, tokenizer, dtype), os.getpid()),
        )

    def run(self, most: int, report: Report | None) -> Corpus:
        """Read, tokenize and write everything, then the record."""
        journal = self._journal
        try:
            for index in range(journal.source, len(self._readers)):
                if index > journal.source:
                    journal.source, journal.position, journal.tokens = index, None, 0
                due = time.monotonic() + SYNC_SECONDS
                wanted = self._readers[index].source.tokens
                if wanted is not None and journal.tokens >= wanted:
                    continue
                held_out = self._readers[index].source.part == "held_out"
                for piece, (parts, bad) in self._encoded(index):
                    for part, arrays in zip(self._parts, parts, strict=True):
                        part.append(arrays)
                    journal.tokens += len(parts[held_out][0])
                    journal.read, journal.position = piece.read, piece.position
                    journal.bad += map(list, bad)
                    journal.commits[str(index)] = self._readers[index].commit
                    if len(journal.bad) > most + MOST_LISTED:
                        raise self._too_many(most)
                    if report:
                        counts = [shard for part in journal.shards for shard in part]
                        documents, tokens = (sum(shard[i] for shard in counts) for i in (0, 1))
                        report(documents, tokens, self._share(index))
                    if time.monotonic() > due:
                        self._sync()
                        due = time.monotonic() + SYNC_SECONDS
                    if wanted is not None and journal.tokens >= wanted:
                        break
            self._sync()
            if len(journal.bad) > most:
                raise self._too_many(most)
            return self._finish()
        except BrokenProcessPool as error:
            want = "one that lives: it was killed, probably for memory; try fewer"
            raise ConfigError("workers", self._workers, want) from error
        finally:
            self._pool.shutdown(cancel_futures=True)
            for part in self._parts:
                part.close()

    def _encoded(self, index: int) -> Iterator[tuple[Piece, Encoded]]:
        """Yield the rest of a source, in order, while the processes are some pieces ahead."""
        journal = self._journal
        position = journal.position if index == journal.source else None
        ahead: deque[tuple[Piece, Future[Encoded]]] = deque()
        for piece in self._readers[index].pieces(position):
            ahead.append((piece, self._pool.submit(_encode, index, piece)))
            # So far ahead that no process waits while this one waits for the disk.
            if len(ahead) > 4 * self._workers:
                first, encoded = ahead.popleft()
                yield first, encoded.result()
        for piece, encoded in ahead:
            yield piece, encoded.result()

    def _share(self, index: int) -> float | None:
        """Return the share of the work that is done; None for a dataset without a limit."""
        wanted, size = self._readers[index].source.tokens, self._readers[index].size
        shares = [self._journal.tokens / wanted] if wanted else []
        shares += [self._journal.read / size] if size else []
        return (index + max(shares)) / len(self._readers) if shares else None

    def _sync(self) -> None:
        for part in self._parts:
            part.flush()
        write_json(self._folder / JOURNAL, asdict(self._journal))

    def _too_many(self, most: int) -> DataError:
        """List the records that are lost, and return the error."""
        self._sync()
        bad = self._journal.bad
        listed = self._folder / BAD_RECORDS
        listed.write_text("".join(f"{where}: expected {want}\n" for where, want in bad))
        where, want = bad[0]
        more = f" ({len(bad)} such records, listed in {listed}" if len(bad) > 1 else " (1 record"
        advice = f"; --max_bad_records or training.max_bad_records = {len(bad)} leaves them out)"
        return DataError(self._readers[0].source.key, where, want + more + advice)

    def _finish(self) -> Corpus:
        for part in self._parts:
            part.finish()
        infos = [part.infos() for part in self._parts]
        if not any(infos):
            named = str(self._readers[0].source)
            raise ConfigError(self._readers[0].source.key, named, "a corpus with text in it")
        # Read again from the disk, so that the checksums are of what is there.
        sums = [[self._pool.submit(checksum, i.prefix, self._kind) for i in p] for p in infos]
        hashed = [
            [replace(info, sha256=digest.result()) for info, digest in zip(*pair, strict=True)]
            for pair in zip(infos, sums, strict=True)
        ]
        tokenizer = {
            "sha256": tokenizer_identity(self._tokenizer),
            "bos": getattr(self._tokenizer, "bos_id", None),
            "eos": self._tokenizer.eos_id,
            "vocabulary": vocabulary(self._tokenizer),
        }
        sources = [
            asdict(reader.source) | {"files": len(reader.files), "commit": reader.commit}
            for reader in self._readers
        ]
        limits = [float(reader.limit) / 2**64 for reader in self._readers]
        save_record(
            self._folder,
            self._kind,
            tokenizer,
            hashed,
            sources=sources,
            held_out_share=limits,
            signature=self._journal.signature,
            bad_records=[f"{where}: expected {want}" for where, want in self._journal.bad],
        )
        for scratch in (*self._folder.glob("*.lengths"), self._folder / JOURNAL):
            scratch.unlink()
        return Corpus.open(self._folder)


class _Shards:
    """The shards of a part, written one after another.

    Args:
        prefix: Path of all of them, without the number.
        kinds: Suffix and type of the files of each.
        counts: Documents and tokens of each so far; kept up to date.
        most: Bytes of tokens after which one ends.
    """

    def __init__(
        self,
        prefix: Path,
        kinds: list[tuple[str, npt.DTypeLike]],
        counts: list[list[int]],
        most: int,
    ) -> None:
        self._prefix, self._kinds, self._counts = prefix, kinds, counts
        self._most = most // np.dtype(kinds[0][1]).itemsize
        self._open: list[IndexedWriter] = []

    def append(self, arrays: Arrays) -> None:
        """Append documents: tokens, lengths and, of pairs, the loss mask."""
        tokens, lengths, *mask = arrays
        if not len(lengths):
            return
        # A journal ends with a full shard where the process was killed before the next one.
        if not self._open and (not self._counts or self._counts[-1][1] >= self._most):
            self._counts.append([0, 0])
        documents, written = self._counts[-1]
        for writer, values in zip(self._writers(), [tokens, *mask], strict=True):
            writer.append(values, lengths)
        self._counts[-1] = [documents + len(lengths), written + len(tokens)]
        if self._counts[-1][1] >= self._most:
            self.finish()

    def _writers(self) -> list[IndexedWriter]:
        """Open the last shard if it is not open, behind what it has."""
        if not self._open and self._counts:
            name, counts = self._name(len(self._counts) - 1), self._counts[-1]
            self._open = [IndexedWriter(name + end, kind, *counts) for end, kind in self._kinds]
        return self._open

    def flush(self) -> None:
        """Wait until what is written is on the disk."""
        for writer in self._open:
            writer.flush()

    def finish(self) -> None:
        """End the last shard; all of it may be from a process that was killed."""
        for writer in self._writers():
            writer.finish()
        self._open = []

    def infos(self) -> list[ShardInfo]:
        """Return the shards, without checksums."""
        counts = enumerate(self._counts)
        return [ShardInfo(self._name(i), tokens, documents) for i, (documents, tokens) in counts]

    def close(self) -> None:
        """Close the files as they are."""
        for writer in self._open:
            with suppress(OSError):  # a full disk, reported already
                writer.close()
        self._open = []

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number:05d}"


class _Work:
    """What a process needs to encode pieces."""

    def __init__(
        self, readers: Sequence[Reader], tokenizer: HuggingFaceTokenizer, dtype: npt.DTypeLike
    ) -> None:
        self._readers, self._tokenizer, self._dtype = readers, tokenizer, dtype
        self._pairs = PairEncoder(tokenizer) if readers[0].pairs else None

    def __call__(self, index: int, piece: Piece) -> Encoded:
        """Decode and tokenize a piece of a source."""
        texts: tuple[list[str], list[str]] = ([], [])
        bad: list[Bad] = []
        for found in self._readers[index].documents(piece):
            if isinstance(found, Bad):
                bad.append(found)
            else:
                texts[found[1]].append(found[0])
        return (self._encode(texts[0]), self._encode(texts[1])), bad

    def _encode(self, documents: list[str]) -> Arrays:
        if self._pairs is not None:
            found = [self._pairs.encode(document) for document in documents]
        else:
            found = encode_documents(self._tokenizer, documents)
        lengths = np.array([len(tokens) for tokens in found], dtype=np.int32)
        joined = np.concatenate([np.empty(0, dtype=np.int32), *found])
        if self._pairs is None:
            return [joined.astype(self._dtype), lengths]
        # Complements are tokens of prompts (`data.pairs`).
        mask = (joined >= 0).astype(np.uint8)
        return [np.where(joined >= 0, joined, ~joined).astype(self._dtype), lengths, mask]


_work: _Work | None = None


def _begin(work: _Work, parent: int) -> None:
    """Set up a process that tokenizes, in one thread: there is one per core."""
    global _work
    _work = work
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(index: int, piece: Piece) -> Encoded:
    assert _work is not None
    return _work(index, piece)


def vocabulary(tokenizer: HuggingFaceTokenizer) -> int:
    """Return the largest id plus one, or the number of tokens: ids can have gaps."""
    return max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values(), default=-1))


def encode_documents(tokenizer: HuggingFaceTokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Tokenise documents, on all cores and without Python's lock.

    The ids are those of ``encode(text, add_bos=True, add_eos=True)``, which keeps the lock.
    """
    rust = tokenizer.tokenizer
    # A tokenizer that pads would pad to the longest document of the batch.
    batches = [[text] for text in texts] if rust.padding else [list(texts)]
    # The fast call omits the offsets of the tokens in the text.
    found = (each.ids for batch in batches for each in rust.encode_batch_fast(batch))
    begin, end = (
        [] if added or token is None else [token]
        for token, added in (
            (tokenizer.bos_id, tokenizer.hf_adds_bos),
            (tokenizer.eos_id, tokenizer.hf_adds_eos),
        )
    )
    return [np.array([*begin, *ids, *end], dtype=np.int32) for ids in found]


def tokenizer_identity(tokenizer: HuggingFaceTokenizer) -> str:
    """Return a digest of all that determines a tokenizer's ids, its library's version included."""
    ends = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.hf_adds_bos, tokenizer.hf_adds_eos]
    if tokenizer.tokenizer.encode_special_tokens:  # is no part of its JSON
        ends.append(True)
    parts = [version("tokenizers"), repr(ends), tokenizer.tokenizer.to_str()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
