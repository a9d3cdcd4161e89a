# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""A prepared corpus: a folder of shards in Megatron's format, ``corpus.json``, and its rows.

``train-*`` are trained on, ``held_out-*`` are for validation. A shard of pairs or chats has two
files more, ``train-00000.loss``: uint8 of the same lengths, 1 where the token is a target. A folder
without ``corpus.json``, as Megatron-LM and NeMo Curator write it, is all training.

``X.bin`` has the tokens of many documents alone. ``X.idx`` has, little endian: the magic
``MMIDIDX\0\0``, version 1 (u64), a code of the tokens' type (u8), the number of sequences n and of
document borders m (u64 each), the sequences' lengths in tokens (n int32), where they start in bytes
(n int64), and the borders of documents as counts of sequences (m int64, from 0 to n). A document is
one sequence, so m is n + 1.

The shards of a part are one sequence of tokens. `Rows` cuts text into windows of ``seq_len + 1``
tokens that do not overlap, as torchtitan's ``HuggingFaceTextDataset``; a last one that is not full
is dropped, and a window may go on in the next document and the next shard. Pairs and chats are
packed instead (`Rows._packed`).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.config.files import open_regular, read_json, sample_of
from torchtitan_lr.console.terminal import progress
from torchtitan_lr.errors import DataError, require
from torchtitan_lr.titan import IGNORE_INDEX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEY = "training.dataset_path"

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")

_DTYPES = {1: np.uint8, 4: np.int32, 5: np.int64, 8: np.uint16}  # of token ids and loss masks

FORMAT, RECORD, PARTS = "torchtitan_lr tokens 2", "corpus.json", ("train", "held_out")

BEGUN = "preparing.json"  # the first file of a preparation; a finished folder has it no more

OPEN_SHARDS = 256  # stay open in a process, each with two files; another one opens within 1 ms
CHECKED_BYTES = 256 << 20  # `Corpus.check` compares checksums of shards up to this size in sum

DOCUMENTS = "documents"  # of a batch's inputs: the documents' indices; the model's argument

Indices = npt.NDArray[np.int64]
Batch: TypeAlias = "tuple[dict[str, Tensor], Tensor]"
"""``({"input": (b, s), ...}, labels (b, s))``, int64, on the CPU; ``"documents"`` (b, s) too where
documents are kept apart."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard."""

    tokens: int
    documents: int
    sha256: str  # of its files; empty in a folder without `corpus.json`
    name: str  # of its files without .bin and .idx


@dataclass(frozen=True, eq=False)  # hashed by its identity
class Corpus:
    """A prepared folder."""

    folder: Path
    train: list[ShardInfo]
    held_out: list[ShardInfo]
    kind: Literal["text", "pairs"]  # pairs have a loss mask
    identity: str  # digest of the content; the same wherever the folder is
    record: dict[str, Any] = field(repr=False)  # all of `corpus.json`
    key: str = KEY  # to name in errors

    @staticmethod
    def open(folder: str | Path, key: str = KEY) -> Corpus:
        """Read ``corpus.json``, or without it the headers of shards; a ConfigError without both."""
        place = Path(folder)
        if (place / RECORD).exists():
            return _recorded(place, key)
        want = "a preparation that is finished: the command that began it goes on with it"
        require(not (place / BEGUN).exists(), key, str(place), want)
        train, files = [], list[Path]()
        for path in sorted(place.glob("*.idx")):
            shard = IndexedDataset(path.with_suffix(""), key)
            train.append(ShardInfo(shard.num_tokens, shard.num_documents, "", path.stem))
            files += [path.with_suffix(".bin"), path]
        require(train, key, str(place), f"a folder with {RECORD}, or with .bin and .idx files")
        # Nobody has written checksums there, and two texts can have equal counts.
        samples, _ = sample_of(files)
        identity = identity_of("text", {"samples": samples}, [train, []])
        return Corpus(place, train, [], "text", identity, {}, key)

    def tokens(self, held_out: bool = False) -> int:
        """Return the number of tokens of a part."""
        return sum(shard.tokens for shard in (self.held_out if held_out else self.train))

    @lru_cache(OPEN_SHARDS)  # noqa: B019 (a corpus is read until the process ends)
    def shard(self, info: ShardInfo, loss: bool = False) -> IndexedDataset:
        """Open a shard, or its loss mask; a DataError if its files are not those of the record."""
        # The last part of the name: a record cannot lead out of its folder.
        prefix = str(self.folder / Path(info.name).name) + ".loss" * loss
        shard = IndexedDataset(prefix, self.key)
        if (shard.num_tokens, shard.num_documents) != (info.tokens, info.documents):
            want = f"{info.tokens} tokens in {info.documents} documents as recorded"
            want += f", not {shard.num_tokens} in {shard.num_documents}"
            raise DataError(self.key, shard.prefix, want)
        return shard

    def check(self, most: float = CHECKED_BYTES) -> None:
        """Raise a DataError if a file is missing, cut, of another pair or changed.

        Sizes, headers and the ends of indices are read of all; of the first shards, up to ``most``
        bytes in sum, everything.
        """
        Corpus.shard.cache_clear()  # what is there now
        shards = self.train + self.held_out
        for info in progress(shards, "checking", len(shards), "shards"):
            files = [self.shard(info)]
            if self.kind == "pairs":
                files.append(self.shard(info, loss=True))
            most -= sum(2 * each.num_tokens + 8 * each.num_documents for each in files)
            if most >= 0 and info.sha256 not in ("", _sum_of(files)):
                want = f"files with the checksum {info.sha256[:12]} of {RECORD}: they were changed"
                raise DataError(self.key, files[0].prefix, f"{want}; {_again(self.folder)}")

    def check_ids(self, vocabulary: int) -> None:
        """Raise a DataError if a token is no row of a model's vocabulary.

        Those of other writers, and of larger tokenizers, are all read.
        """
        if self.record.get("tokenizer", {}).get("vocabulary", math.inf) <= vocabulary:
            return
        for info in progress(self.train + self.held_out, "checking token ids", unit="shards"):
            shard = self.shard(info)
            for start in range(0, shard.num_tokens, 1 << 20):
                ids = shard.read(start, min(start + (1 << 20), shard.num_tokens))
                wrong = (ids < 0) | (ids >= vocabulary)
                if wrong.any():
                    place = int(wrong.argmax())
                    want = f"token ids from 0 to {vocabulary - 1}, the model's, not {ids[place]} as"
                    want += f" token {start + place}; model.vocab_size sets another number"
                    raise DataError(self.key, f"{shard.prefix}.bin", want)


def _sum_of(files: Sequence[IndexedDataset]) -> str:
    """Read whole files, and return their checksum."""
    digest = hashlib.sha256()
    for each in files:
        each.check()
        for end in (".bin", ".idx"):
            with open(each.prefix + end, "rb") as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
    return digest.hexdigest()


def _again(folder: Path) -> str:
    return f"delete {folder}, and `torchtitan-lr prepare ... --out {folder}` or train writes it"


def _recorded(folder: Path, key: str) -> Corpus:
    """Read ``corpus.json``; errors as for `Corpus.open`."""
    try:
        found = read_json(folder / RECORD)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        train = [ShardInfo(**shard) for shard in found["train"]]
        held_out = [ShardInfo(**shard) for shard in found["held_out"]]
        identity = identity_of(found["kind"], found["tokenizer"], [train, held_out])
        if found["identity"] != identity:
            raise ValueError("its shards are not those of its identity")
    except Exception as error:  # a stranger's JSON can have any form
        want = f"a record of format {FORMAT!r} ({type(error).__name__}: {error})"
        raise DataError(key, str(folder / RECORD), f"{want}; {_again(folder)}") from error
    return Corpus(folder, train, held_out, found["kind"], identity, found, key)


def save_record(folder: Path, about: dict[str, Any], parts: Sequence[Sequence[ShardInfo]]) -> None:
    """Write ``corpus.json``; ``about`` has the ``kind``, what identifies the ``tokenizer``, etc."""
    identity = identity_of(about["kind"], about["tokenizer"], parts)
    record = {"format": FORMAT, "identity": identity} | about
    for part, shards in zip(PARTS, parts, strict=True):
        record[part] = [asdict(shard) for shard in shards]
    with suppress(FileNotFoundError):  # another machine was first, and has moved the file
        write_whole(folder / RECORD, json.dumps(record, indent=1))


def identity_of(kind: str, tokenizer: dict[str, Any], parts: Sequence[Sequence[ShardInfo]]) -> str:
    """Return the digest of a corpus' content, from those of its shards."""
    shards = []
    for part in parts:
        shards.append([(shard.tokens, shard.documents, shard.sha256) for shard in part])
    text = json.dumps([FORMAT, kind, tokenizer, shards], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class IndexedDataset:
    """One pair of files ``PREFIX.bin`` and ``PREFIX.idx``; a DataError if they are not readable.

    Opening reads the header and the ends of the index, whatever the size of the files: it finds a
    file that was cut and an index of other tokens. `check` reads all of the index.
    """

    def __init__(self, prefix: str | Path, key: str = KEY) -> None:
        self.prefix, self._key = str(prefix), key
        try:
            with open_regular(f"{prefix}.idx", sys.maxsize) as file:
                index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with open_regular(f"{prefix}.bin", sys.maxsize) as file:
                self._file = os.dup(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: there is nothing to map
            raise self._error(".idx", f"a readable pair of .bin and .idx ({error})") from error
        weakref.finalize(self, os.close, self._file)
        if len(index) < _HEADER.size or index[:9] != _MAGIC:
            raise self._error(".idx", f"an index of Megatron's format, which begins {_MAGIC!r}")
        _, version, code, count, borders = _HEADER.unpack_from(index)
        if version != 1 or code not in _DTYPES:
            want = f"version 1 and a type of {sorted(_DTYPES)}, not version {version}, type {code}"
            raise self._error(".idx", want)
        # Counts are from the file: compare in Python's integers, before numpy sees them. A byte
        # per sequence (multimodal modes) may follow.
        size = _HEADER.size + 12 * count + 8 * borders
        if borders != count + 1 or len(index) not in (size, size + count):
            want = f"an intact index of one sequence per document: {count} sequences and {borders}"
            raise self._error(".idx", f"{want} borders do not fill its {len(index)} bytes")
        self._dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        self._size = self._dtype.itemsize
        # Of each document (n,), mapped: its tokens, and the bytes before it.
        self.lengths = np.frombuffer(index, "<i4", count, _HEADER.size)
        self.offsets = np.frombuffer(index, "<i8", count, _HEADER.size + 4 * count)
        self._borders = np.frombuffer(index, "<i8", borders, _HEADER.size + 12 * count)
        held = os.fstat(self._file).st_size
        self.num_documents, self.num_tokens = count, held // self._size
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * self._size if count else 0
        if held % self._size or end != held:
            want = f"the {end} bytes that {Path(self.prefix).name}.idx ends at, not {held}"
            raise self._error(".bin", f"{want}: it was cut, or the index is of another .bin")

    def _error(self, suffix: str, want: str) -> DataError:
        return DataError(self._key, f"{self.prefix}{suffix}", want)

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Read the tokens from ``start`` to before ``stop``, by default all ``(n,)``."""
        count = ((self.num_tokens if stop is None else stop) - start) * self._size
        try:
            # One call for a window: of a mapped file every page would fault, with read-ahead.
            found = os.pread(self._file, count, start * self._size)
            return np.frombuffer(found, self._dtype, count // self._size)
        except (OSError, ValueError) as error:  # ValueError: fewer tokens than there were
            raise self._error(".bin", f"a file whose tokens can all be read ({error})") from error

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the places of ``start .. stop - 1`` at which a document begins ``(n,)``."""
        # A binary search touches a few pages of the index; the index is not kept in memory.
        first, last = np.searchsorted(self.offsets, (start * self._size, stop * self._size))
        return self.offsets[first:last] // self._size

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Tokens up to the end of each document ``(n,)``."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def check(self) -> None:
        """Read the whole index, and compare its arrays with each other."""
        sizes = self.lengths * np.int64(self._size)
        follow = (sizes >= 0).all() and np.array_equal(self.offsets, np.cumsum(sizes) - sizes)
        if not follow or not np.array_equal(self._borders, np.arange(len(sizes) + 1)):
            want = "documents of one sequence each that follow each other without gaps"
            raise self._error(".idx", want)


def write_shard(
    folder: Path, name: str, lengths: npt.NDArray[Any], files: Mapping[str, npt.NDArray[Any]]
) -> ShardInfo:
    """Write the files of a shard, until they are on the disk.

    ``lengths`` (documents,) are in tokens; ``files`` (tokens,) are the tokens under ``""``, and the
    loss mask of pairs under ``".loss"``.
    """
    digest = hashlib.sha256()
    for suffix, values in files.items():
        for end, content in ((".bin", values.tobytes()), (".idx", _index(values.dtype, lengths))):
            write_over(folder / f"{name}{suffix}{end}", content)
            digest.update(content)
    return ShardInfo(len(files[""]), len(lengths), digest.hexdigest(), name)


def _index(dtype: npt.DTypeLike, lengths: npt.NDArray[Any]) -> bytes:
    """Return the ``.idx`` of one sequence per document."""
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    count, sizes = len(lengths), lengths * np.int64(np.dtype(dtype).itemsize)
    places = np.concatenate([np.cumsum(sizes) - sizes, np.arange(count + 1)])
    header = _HEADER.pack(_MAGIC, 1, code, count, count + 1)
    return header + lengths.astype("<i4").tobytes() + places.astype("<i8").tobytes()


def write_over(path: Path, content: bytes) -> None:
    """Write a file without emptying it first: another machine may write the same bytes there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


class Rows:
    """The rows of one part of a corpus, in the order of its tokens; a ConfigError without any.

    Documents are kept apart with ``mask_documents``, pairs always. ``weight`` is the share in a
    mixture, and ``name`` is for logs. Of pairs, ``cut`` are longer than a row, and ``left_out``
    have then no label left.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        held_out: bool = False,
        mask_documents: bool = False,
        name: str = "",
        weight: float = 1.0,
    ) -> None:
        self.corpus, self.seq_len, self.name, self.weight = corpus, seq_len, name, weight
        self.pairs = corpus.kind == "pairs"
        self.apart = mask_documents or self.pairs
        self._shards = corpus.held_out if held_out else corpus.train
        self._size, self.cut, self.left_out = seq_len + 1, 0, 0
        self._starts = np.cumsum([0, *(shard.tokens for shard in self._shards)], dtype=np.int64)
        tokens = int(self._starts[-1])
        self._count = tokens // self._size
        if self.pairs:
            self._firsts, self._lasts = self._packed()
            self._count = len(self._firsts)
        part = f"the {'held-out' if held_out else 'training'} part of {name} {corpus.folder}"
        want = f"at most {max(0, tokens - 1)}: {part} has {tokens} tokens"
        if self.pairs:
            want = f"more tokens: in {part} no answer has room behind its prompt"
        require(self._count, f"{'validation' if held_out else 'training'}.seq_len", seq_len, want)

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Indices) -> Batch:
        """Read some rows (b,); their labels are those of `labelled`."""
        first, last = rows * self._size, (rows + 1) * self._size
        if self.pairs:
            first, last = self._firsts[rows], self._lasts[rows]
        tokens = np.zeros((len(rows), self._size), dtype=np.int64)
        targets, begins = np.zeros((2, *tokens.shape), dtype=bool)
        shards = np.searchsorted(self._starts, first, side="right") - 1
        # By shard, so that each is opened once for a batch.
        for row in np.argsort(shards, kind="stable").tolist():
            start, stop, index = int(first[row]), int(last[row]), int(shards[row])
            place = start
            while place < stop:  # a row may be in several shards
                info, offset = self._shards[index], int(self._starts[index])
                end = min(stop, int(self._starts[index + 1]))
                inside, here = (place - offset, end - offset), slice(place - start, end - start)
                shard = self.corpus.shard(info)
                tokens[row, here] = shard.read(*inside)
                if self.pairs:
                    targets[row, here] = self.corpus.shard(info, loss=True).read(*inside)
                if self.apart:
                    begins[row, shard.starts(*inside) + (offset - start)] = True
                place, index = end, index + 1
            if stop - start < self._size:
                begins[row, stop - start] = True  # the padding
        return labelled(tokens, targets if self.pairs else None, begins if self.apart else None)

    def _packed(self) -> tuple[Indices, Indices]:
        """Return where each row of pairs begins and ends, in tokens (rows,).

        A row holds as many whole pairs as its s + 1 tokens have room for. A longer pair has a row
        of its own and is cut; without a label in what is left it has no row. With s + 1 = 10, pairs
        of 4, 5, 3, 12 and 6 tokens make four rows, which begin at the tokens 0, 9, 12 and 24, and
        end before 9, 12, 22 and 30.
        """
        ends = [np.empty(0, dtype=np.int64)]  # of each pair, in tokens of the part (pairs,)
        for info, offset in zip(self._shards, self._starts, strict=False):
            ends.append(self.corpus.shard(info).ends + offset)
        pair_ends = np.concatenate(ends)
        starts = np.append(0, pair_ends)[:-1]
        unusable = self._without_label(starts, pair_ends)
        # For a row that begins with pair i, the pair behind it: 2, 3, 3, 4, 5 in the example.
        fits = np.searchsorted(pair_ends, starts + self._size, side="right")
        following = np.maximum(fits, np.arange(len(pair_ends)) + 1)  # a long pair does not fit
        first_pairs, pair, next_pairs = list[int](), 0, following.tolist()
        while pair < len(pair_ends):
            if pair not in unusable:
                first_pairs.append(pair)
            pair = next_pairs[pair]
        firsts = starts[first_pairs]
        return firsts, np.minimum(pair_ends[following[first_pairs] - 1], firsts + self._size)

    def _without_label(self, starts: Indices, ends: Indices) -> set[int]:
        """Return the pairs that are cut before their first label; count the cut ones."""
        long = np.flatnonzero(ends - starts > self._size).tolist()
        found = set()
        for pair in long:
            index = int(np.searchsorted(self._starts, starts[pair], side="right")) - 1
            mask = self.corpus.shard(self._shards[index], loss=True)
            first = int(starts[pair] - self._starts[index])
            if not mask.read(first + 1, first + self._size).any():
                found.add(pair)
        self.cut, self.left_out = len(long), len(found)
        return found


def labelled(
    tokens: npt.NDArray[np.int64],
    targets: npt.NDArray[np.bool_] | None = None,
    begins: npt.NDArray[np.bool_] | None = None,
) -> Batch:
    """Make inputs and labels of rows (b, s + 1).

    A label is ignored if it is no target (without ``targets`` all are), or begins a document that
    is kept apart, or the padding behind the last one.
    """
    import torch  # imported late: the launcher checks the lengths of corpora without it

    labels = tokens[:, 1:].copy()
    if targets is not None:
        labels[~targets[:, 1:]] = IGNORE_INDEX
    inputs = {"input": torch.from_numpy(tokens[:, :-1].copy())}
    if begins is not None:
        labels[begins[:, 1:]] = IGNORE_INDEX
        documents = np.cumsum(begins[:, :-1], axis=1, dtype=np.int64)
        inputs[DOCUMENTS] = torch.from_numpy(documents)
    return inputs, torch.from_numpy(labels)


def read_parts(parts: Sequence[Rows], chosen: Indices, numbers: Indices) -> Batch:
    """Read rows: which part each is of (b,), and its number in that part (b,).

    Where one part keeps its documents apart, each row of the others is one document.
    """
    import torch

    apart = any(part.apart for part in parts)
    labels = torch.zeros(len(chosen), parts[0].seq_len, dtype=torch.int64)
    inputs = {name: torch.zeros_like(labels) for name in ["input", *[DOCUMENTS] * apart]}
    for index in np.unique(chosen).tolist():
        places = torch.from_numpy(chosen == index)
        own_inputs, labels[places] = parts[index].read(numbers[chosen == index])
        for name, values in own_inputs.items():
            inputs[name][places] = values
    return inputs, labels


class ValidationSet:
    """One rank's share of the held-out rows; the parts of a mixture come in turn.

    Sequence ``i`` is of rank ``i mod D``. Where sequences are missing, rows of ignored labels take
    their place: no rank waits for another, and the token-weighted mean is exact for any ``D``.
    ``steps`` is the most batches per rank, -1 for all sequences.
    """

    def __init__(
        self, parts: Sequence[Rows], batch_size: int, dp_world_size: int, dp_rank: int, steps: int
    ) -> None:
        self._parts, self._batch_size = list(parts), batch_size
        counts, size = [len(part) for part in parts], batch_size * dp_world_size
        numbers = np.concatenate([np.arange(count) for count in counts])
        rows = np.stack([np.repeat(np.arange(len(counts)), counts), numbers])
        most = steps * size if steps > 0 else len(numbers)
        rows = rows[:, np.argsort(numbers, kind="stable")[:most]]
        # The part of each sequence, and its number there (2, n); -1 where there is none.
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)), constant_values=-1)
        self._rows = rows[:, dp_rank::dp_world_size]

    def __len__(self) -> int:
        return self._rows.shape[1] // self._batch_size

    def __iter__(self) -> Iterator[Batch]:
        for rows in np.split(self._rows, len(self), axis=1):
            # A rank without a sequence for this batch reads the first one, and ignores it.
            inputs, labels = read_parts(self._parts, *np.maximum(rows, 0))
            missing = rows[0] < 0
            inputs["input"][missing], labels[missing] = 0, IGNORE_INDEX
            yield inputs, labels

    def ignored(self) -> Batch:
        """Return a batch like the others, whose labels are all ignored, without a read."""
        tokens = np.zeros((self._batch_size, self._parts[0].seq_len + 1), dtype=np.int64)
        nowhere, apart = tokens > 0, any(part.apart for part in self._parts)
        return labelled(tokens, nowhere, nowhere if apart else None)


def moved(batch: Batch, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return tokens (b, s), labels (b, s) and the model's other arguments on a device."""
    inputs = {name: value.to(device, non_blocking=True) for name, value in batch[0].items()}
    return inputs.pop("input"), batch[1].to(device, non_blocking=True), inputs
