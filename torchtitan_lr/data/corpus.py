# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A prepared corpus: a folder of shards in Megatron's format, and ``corpus.json`` about them.

``train-*`` are trained on, ``held_out-*`` are for validation. Of pairs and chats each shard has a
second pair of files, ``train-00000.loss``: uint8 of the same lengths, 1 where the token is a
target. A folder without ``corpus.json``, as Megatron-LM and NeMo Curator write it, is all training.

Opening reads ``corpus.json`` alone, so it costs the same for a gigabyte and for a terabyte. Shards
are opened when a row needs them, and a few stay open: a mapped file holds a descriptor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

from torchtitan_lr.data.indexed import KEY, IndexedDataset
from torchtitan_lr.errors import ConfigError, DataError

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
        return _opened(self.folder, info.name, loss, info.tokens, info.documents)

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


def save_record(
    folder: Path,
    kind: Kind,
    tokenizer: dict[str, Any],
    counts: list[list[list[int]]],
    more: dict[str, Any] | None = None,
    apply: Callable[..., Iterable[str]] = map,
) -> Corpus:
    """Write ``corpus.json``, the last file of a preparation: a folder that has it is whole.

    ``tokenizer`` has its hash (``sha256``). ``counts`` are documents and tokens of each shard, to
    train on and held out. ``apply`` maps the checksum over them.
    """
    shards = []
    for part, pairs in zip(PARTS, counts, strict=True):
        names = [f"{part}-{index:05d}" for index in range(len(pairs))]
        # Read again from the disk, so that the checksums are of what is there.
        sums = apply(checksum, [str(folder / name) for name in names], repeat(kind))
        found = zip(names, pairs, sums, strict=True)
        shards.append([ShardInfo(pair[1], pair[0], digest, name) for name, pair, digest in found])
    identity = identity_of(kind, tokenizer["sha256"], shards)
    record: dict[str, Any] = {"format": FORMAT, "kind": kind, "identity": identity}
    record |= {"tokenizer": tokenizer} | (more or {})
    for part, infos in zip(PARTS, shards, strict=True):
        record[part] = [asdict(info) for info in infos]
    write_json(folder / RECORD, record)
    return Corpus.open(folder)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file by a rename: after a crash it is the old one or the new one."""
    scratch = Path(f"{path}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


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
def _opened(folder: Path, name: str, loss: bool, tokens: int, documents: int) -> IndexedDataset:
    # The last part of the name: a record cannot lead out of its folder. Joined here and not for
    # every row: a path costs as much as reading one.
    prefix = str(folder / Path(name).name) + (".loss" if loss else "")
    shard = IndexedDataset(prefix)
    if (shard.num_tokens, shard.num_documents) != (tokens, documents):
        want = f"{tokens} tokens in {documents} documents as recorded, not {shard.num_tokens}"
        raise DataError(KEY, prefix, f"{want} in {shard.num_documents}")
    return shard
