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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

from torchtitan_lr.data.indexed import KEY, IndexedDataset, replacing
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
