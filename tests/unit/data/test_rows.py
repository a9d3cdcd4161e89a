# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rows of a prepared corpus, against slow references that know lists alone."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.loss import IGNORE_INDEX

from tests.support.corpora import write_corpus
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.rows import DOCUMENTS, Rows
from torchtitan_lr.errors import ConfigError, DataError

S = 7
"""Tokens of an input."""


def read(rows):
    """All rows, as lists: tokens, labels, documents."""
    inputs, labels = rows.read(np.arange(len(rows)))
    assert all(value.dtype == torch.int64 and value.is_contiguous() for value in inputs.values())
    documents = inputs[DOCUMENTS].tolist() if DOCUMENTS in inputs else None
    return inputs["input"].tolist(), labels.tolist(), documents


def same_document(documents):
    """Which tokens of each row are of one document: what the mask and the positions depend on."""
    return [[[a == b for b in row] for a in row] for row in documents]


def documents_of(lengths):
    """Documents whose tokens are all different."""
    tokens = iter(range(1, 60000))
    return [[next(tokens) for _ in range(length)] for length in lengths]


LENGTHS = st.lists(st.lists(st.integers(0, 2 * S), min_size=1, max_size=8), min_size=1, max_size=3)


@given(lengths=LENGTHS, held_out=st.booleans())
@settings(max_examples=25, deadline=None)
def test_text_is_cut_and_its_documents_are_those_of_a_slow_reference(
    lengths, held_out, tmp_path_factory
):
    shards = [documents_of(shard) for shard in lengths]
    other = [documents_of([3])]
    parts = (other, shards) if held_out else (shards, other)
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"), *parts)
    flat = [token for shard in shards for document in shard for token in document]
    owner = [(i, j) for i, shard in enumerate(shards) for j, doc in enumerate(shard) for _ in doc]
    windows = [slice(k, k + S + 1) for k in range(0, len(flat) - S, S + 1)]
    part = "validation" if held_out else "training"
    if not windows:
        with pytest.raises(ConfigError, match=rf"^{part}\.seq_len: got 7, expected at most"):
            Rows(corpus, S, held_out)
        return
    tokens, labels, documents = read(Rows(corpus, S, held_out))
    assert documents is None
    assert tokens == [flat[w][:-1] for w in windows]
    assert labels == [flat[w][1:] for w in windows]

    tokens, labels, documents = read(Rows(corpus, S, held_out, mask_documents=True))
    assert tokens == [flat[w][:-1] for w in windows]
    for window, found, here in zip(windows, labels, documents, strict=True):
        owners = owner[window]
        expected = [
            token if owners[i] == owners[i + 1] else IGNORE_INDEX
            for i, token in enumerate(flat[window][1:])
        ]
        assert found == expected
        assert same_document([here]) == [[[a == b for b in owners[:-1]] for a in owners[:-1]]]
        assert here == sorted(here)


PAIRS = st.lists(
    st.tuples(st.integers(1, 2 * S), st.integers(1, 5)), min_size=1, max_size=12
)  # tokens of prompt and answer


@given(first=PAIRS, second=PAIRS)
@settings(max_examples=25, deadline=None)
def test_pairs_are_never_split_and_their_answers_alone_are_labels(first, second, tmp_path_factory):
    shards = [documents_of([p + a for p, a in shard]) for shard in (first, second)]
    masks = [[[0] * p + [1] * a for p, a in shard] for shard in (first, second)]
    corpus = write_corpus(tmp_path_factory.mktemp("pairs"), shards, masks=masks)
    # The slow reference: pairs in their order, each cut to a row, into the open row if it has room.
    rows: list[list[tuple[list[int], list[int]]]] = []
    for shard, shard_masks in zip(shards, masks, strict=True):
        open_row = False
        for pair, mask in zip(shard, shard_masks, strict=True):
            pair, mask = pair[: S + 1], mask[: S + 1]
            if not any(mask[1:]):
                open_row = False
                continue
            if not open_row or sum(len(tokens) for tokens, _ in rows[-1]) + len(pair) > S + 1:
                rows.append([])
            rows[-1].append((pair, mask))
            open_row = True
    if not rows:
        with pytest.raises(ConfigError, match="no answer has room behind its prompt"):
            Rows(corpus, S)
        return
    tokens, labels, documents = read(Rows(corpus, S))
    assert len(tokens) == len(rows)
    for row, inputs, found, here in zip(rows, tokens, labels, documents, strict=True):
        flat = [token for pair, _ in row for token in pair]
        owners = [i for i, (pair, _) in enumerate(row) for _ in pair]
        padding = S + 1 - len(flat)
        assert inputs == (flat + [0] * padding)[:-1]
        owners += [-1] * padding
        targets = [m if i else 0 for _, mask in row for i, m in enumerate(mask)] + [0] * padding
        assert found == [
            (flat + [0] * padding)[i] if targets[i] else IGNORE_INDEX for i in range(1, S + 1)
        ]
        assert same_document([here]) == [[[a == b for b in owners[:-1]] for a in owners[:-1]]]


def test_a_document_of_several_sequences_is_one(tmp_path):
    """Megatron's writers may cut a document into sequences; borders count documents."""
    lengths, borders = [3, 4, 5, 2, 6], [0, 2, 3, 5]  # documents of 7, 5 and 8 tokens
    tokens = np.arange(100, 120, dtype=np.uint16)
    offsets = 2 * (np.cumsum(lengths) - lengths)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(borders))
    parts = (np.array(lengths, "<i4"), offsets.astype("<i8"), np.array(borders, "<i8"))
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "a.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    inputs, labels, documents = read(Rows(Corpus.open(tmp_path), 9, mask_documents=True))
    assert inputs == [list(range(100, 109)), list(range(110, 119))]
    owners = [0] * 7 + [1] * 5 + [2] * 8
    assert same_document(documents) == same_document([owners[:9], owners[10:19]])
    ignored = [
        i
        for row, shift in zip(labels, (1, 11), strict=True)
        for i, t in enumerate(row)
        if t == IGNORE_INDEX and owners[i + shift] != owners[i + shift - 1]
    ]
    assert ignored == [6, 1] and sum(row.count(IGNORE_INDEX) for row in labels) == 2


def test_only_the_part_that_is_read_is_opened(tmp_path):
    shards = [documents_of([40]), documents_of([40])]
    corpus = write_corpus(tmp_path, shards, held_out=shards[:1])
    for path in tmp_path.glob("train-*"):
        path.unlink()
    assert len(read(Rows(corpus, S, held_out=True))[0]) == 5
    with pytest.raises(DataError, match="train-00000"):
        Rows(corpus, S).read(np.arange(1))


def test_open_files_do_not_grow_with_the_shards(tmp_path):
    rows = Rows(write_corpus(tmp_path, [documents_of([S + 1])] * 60), S)
    before = len(os.listdir("/proc/self/fd"))
    assert rows.read(np.arange(60))[0]["input"].tolist() == [list(range(1, S + 1))] * 60
    assert len(os.listdir("/proc/self/fd")) - before < 50  # with all of them open it is 120


def test_another_index_is_refused_before_its_tokens_are_read(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [documents_of([40]), documents_of([9, 30])])
    (tmp_path / "train-00000.idx").write_bytes((tmp_path / "train-00001.idx").read_bytes())
    with pytest.raises(DataError, match=r"train-00000"):
        Rows(corpus, S).read(np.arange(1))
