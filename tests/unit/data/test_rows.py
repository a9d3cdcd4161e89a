# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rows of a prepared corpus, against slow references that know lists alone."""

import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpora import write_corpus
from torchtitan_lr.data.corpus import DOCUMENTS, Corpus, Rows
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan import IGNORE_INDEX

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


def apart(tokens, owners, targets=None):
    """Labels and documents of rows of s + 1 tokens whose documents, the owners, are kept apart."""
    tokens, owners = np.array(tokens), np.array(owners)
    wanted = (owners[:, 1:] == owners[:, :-1]) & (True if targets is None else targets[:, 1:] > 0)
    labels = np.where(wanted, tokens[:, 1:], IGNORE_INDEX)
    return labels.tolist(), same_document(owners[:, :-1].tolist())


def documents_of(lengths):
    """Documents whose tokens are all different."""
    tokens = iter(range(1, 60000))
    return [[next(tokens) for _ in range(length)] for length in lengths]


LENGTHS = st.lists(st.lists(st.integers(0, 2 * S), min_size=1, max_size=8), min_size=1, max_size=3)


@given(lengths=LENGTHS, held_out=st.booleans(), masked=st.booleans())
@settings(max_examples=50, deadline=None)
def test_text_is_cut_and_its_documents_are_those_of_a_slow_reference(
    lengths, held_out, masked, tmp_path_factory
):
    shards = [documents_of(shard) for shard in lengths]
    parts = ([documents_of([3])], shards) if held_out else (shards, [documents_of([3])])
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"), *parts)
    flat = [token for shard in shards for document in shard for token in document]
    lengths = [len(document) for shard in shards for document in shard]
    owner = np.repeat(range(len(lengths)), lengths).tolist()
    starts = range(0, len(flat) - S, S + 1)
    windows, owners = ([values[k : k + S + 1] for k in starts] for values in (flat, owner))
    if not windows:
        part = "validation" if held_out else "training"
        with pytest.raises(ConfigError, match=rf"^{part}\.seq_len: got 7, expected at most"):
            Rows(corpus, S, held_out)
        return
    tokens, labels, documents = read(Rows(corpus, S, held_out, masked))
    assert tokens == [window[:-1] for window in windows]
    if masked:
        assert (labels, same_document(documents)) == apart(windows, owners)
        assert all(here == sorted(here) for here in documents)
    else:
        assert documents is None and labels == [window[1:] for window in windows]


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
    rows: list[list[tuple[int, int, int]]] = []  # a token, whether it is a target, its pair
    for shard, shard_masks in zip(shards, masks, strict=True):
        open_row = False
        for owner, (pair, mask) in enumerate(zip(shard, shard_masks, strict=True)):
            some = [(t, m, owner) for t, m in zip(pair[: S + 1], mask, strict=False)]
            usable = any(mask[1 : S + 1])
            if usable and not (open_row and len(rows[-1]) + len(some) <= S + 1):
                rows.append([])
            if usable:
                rows[-1] += some
            open_row = usable
    if not rows:
        with pytest.raises(ConfigError, match="no answer has room behind its prompt"):
            Rows(corpus, S)
        return
    filled = [row + [(0, 0, -1)] * (S + 1 - len(row)) for row in rows]
    wanted, targets, owners = np.moveaxis(np.array(filled), 2, 0)
    tokens, labels, documents = read(Rows(corpus, S))
    assert tokens == wanted[:, :-1].tolist()
    assert (labels, same_document(documents)) == apart(wanted, owners, targets)


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
    windows, owners = tokens.reshape(2, 10).tolist(), [[0] * 7 + [1] * 3, [1] * 2 + [2] * 8]
    assert inputs == [window[:-1] for window in windows]
    assert (labels, same_document(documents)) == apart(windows, owners)


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
