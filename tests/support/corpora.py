# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Files of text, and prepared corpora of given tokens."""

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from torchtitan_lr.data import corpus, sources
from torchtitan_lr.data.corpus import PARTS, Corpus, ShardInfo, save_record

Documents = Sequence[Sequence[int]]

library_listed_once = partial(patch.object, sources, "library_files", cache(sources.library_files))
"""A context in which the interpreter's library is listed once: that takes as long as a step."""


def write_corpus(
    folder: Path,
    train: Sequence[Documents],
    held_out: Sequence[Documents] = (),
    masks: Sequence[Documents] | None = None,
) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[ShardInfo]] = []
    for part, shards in zip(PARTS, (train, held_out), strict=True):
        first = len(train) if part == "held_out" else 0
        parts.append([])
        for index, documents in enumerate(shards):
            mask = None if masks is None else masks[first + index]
            parts[-1].append(
                write_shard(folder / f"{part}-{index:05d}", np.uint16, documents, mask)
            )
    kind, tokenizer = "text" if masks is None else "pairs", {"sha256": "", "bos": None, "eos": None}
    save_record(folder, {"kind": kind, "tokenizer": tokenizer}, parts)
    return Corpus.open(folder)


def write_shard(
    prefix: Path, dtype: Any, documents: Documents, mask: Documents | None = None
) -> ShardInfo:
    files = {"": _joined(documents, dtype)}
    if mask is not None:
        files[".loss"] = _joined(mask, np.uint8)
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    return corpus.write_shard(prefix.parent, prefix.name, lengths, files)


def _joined(documents: Documents, dtype: Any) -> np.ndarray:
    return np.array([token for document in documents for token in document], dtype=dtype)


def read_documents(found_in: Corpus, held_out: bool = False, loss: bool = False) -> list[list[int]]:
    """Return the documents of a part in their order, or the masks of pairs."""
    found: list[list[int]] = []
    for info in found_in.held_out if held_out else found_in.train:
        shard = found_in.shard(info, loss)
        found += [part.tolist() for part in np.split(shard.read(), shard.ends[:-1])]
    return found


def write_jsonl(path: Path, texts: Sequence[str], opener: Any = open) -> Path:
    """Write documents as the ``"text"`` of lines; the opener may compress them."""
    with opener(path, "wb") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    return path
