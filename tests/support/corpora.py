# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Prepared corpora of given tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.data.corpus import FORMAT, RECORD, Corpus, ShardInfo, checksum, identity_of
from torchtitan_lr.data.indexed import IndexedWriter

Documents = Sequence[Sequence[int]]


def write_corpus(
    folder: Path,
    train: Sequence[Documents],
    held_out: Sequence[Documents] = (),
    masks: Sequence[Documents] | None = None,
) -> Corpus:
    """Write a prepared corpus.

    Args:
        folder: Where; it is created.
        train: The documents of each shard.
        held_out: The same of the held-out part.
        masks: Of pairs: 1 for each token of the train and the held-out shards that is a target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, list[ShardInfo]] = {"train": [], "held_out": []}
    kind = "text" if masks is None else "pairs"
    for index, documents in enumerate([*train, *held_out]):
        part = "train" if index < len(train) else "held_out"
        prefix = folder / f"{part}-{len(shards[part]):05d}"
        _write(prefix, np.uint16, documents)
        if masks is not None:
            _write(f"{prefix}.loss", np.uint8, masks[index])
        sizes = sum(map(len, documents)), len(documents)
        shards[part].append(ShardInfo(str(prefix), *sizes, checksum(str(prefix), kind)))
    record: dict[str, Any] = {"format": FORMAT, "kind": kind}
    record["tokenizer"] = {"sha256": "", "bos": None, "eos": None}
    record["identity"] = identity_of(kind, "", list(shards.values()))
    for part, infos in shards.items():
        record[part] = [vars(info) | {"name": info.name} for info in infos]
    (folder / RECORD).write_text(json.dumps(record))
    return Corpus.open(folder)


def _write(prefix: Any, dtype: Any, documents: Documents) -> None:
    writer = IndexedWriter(prefix, dtype)
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    writer.append(tokens, np.array([len(document) for document in documents], dtype=np.int32))
    writer.finish()
