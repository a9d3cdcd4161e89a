# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Files of text, and prepared corpora of given tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.data.corpus import PARTS, Corpus, save_record, write_index

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
    counts: list[list[list[int]]] = []
    for part, shards in zip(PARTS, (train, held_out), strict=True):
        counts.append([])
        for index, documents in enumerate(shards):
            prefix = str(folder / f"{part}-{index:05d}")
            tokens, size = write_shard(prefix, np.uint16, documents)
            if masks is not None:
                first = len(train) if part == "held_out" else 0
                write_shard(f"{prefix}.loss", np.uint8, masks[first + index])
            counts[-1].append([size, tokens])
    kind, tokenizer = "text" if masks is None else "pairs", {"sha256": "", "bos": None, "eos": None}
    return save_record(folder, {"kind": kind, "tokenizer": tokenizer}, counts)


def write_shard(prefix: Any, dtype: Any, documents: Documents) -> tuple[int, int]:
    """Write one pair of files; return the tokens and the documents in it."""
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    tokens.tofile(f"{prefix}.bin")
    write_index(prefix, dtype, np.array([len(document) for document in documents], dtype=np.int32))
    return len(tokens), len(documents)


def read_documents(corpus: Corpus, held_out: bool = False, loss: bool = False) -> list[list[int]]:
    """Return the documents of a part in their order, or the masks of pairs."""
    found: list[list[int]] = []
    for info in corpus.held_out if held_out else corpus.train:
        shard = corpus.shard(info, loss)
        found += [part.tolist() for part in np.split(shard.read(), shard.ends[:-1])]
    return found


def write_jsonl(path: Path, texts: Sequence[str], opener: Any = open) -> Path:
    """Write documents as the ``"text"`` of lines; the opener may compress them."""
    with opener(path, "wb") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    return path
