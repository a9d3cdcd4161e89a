# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A prepared folder: its record, Megatron's format, its faults; its rows against plain lists."""

import math
import struct
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpora import write_corpus, write_shard
from torchtitan_lr.data.corpus import DOCUMENTS, Corpus, IndexedDataset, Rows
from torchtitan_lr.errors import ConfigError, DataError
from torchtitan_lr.titan import IGNORE_INDEX

S = 7
"""Tokens of an input."""


def build(folder, loss=False, start=0):
    rows = np.arange(start, start + 60).reshape(12, 5).tolist()
    shards = [rows[:5], rows[5:10], rows[10:]]
    masks = [[[token % 2 for token in row] for row in shard] for shard in shards]
    return write_corpus(folder, shards[:2], shards[2:], masks if loss else None)


def test_the_identity_is_that_of_the_content_and_not_of_the_place(tmp_path):
    found = build(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert Corpus.open(tmp_path / "b").identity == found.identity
    others = [build(tmp_path / "c", start=1), build(tmp_path / "d", loss=True)]
    assert len({corpus.identity for corpus in [found, *others]}) == 3


def test_megatron_reads_ours_and_we_read_megatrons(tmp_path):
    for dtype in (np.uint16, np.int32, np.uint8):
        check_with_megatron(tmp_path / dtype.__name__, dtype)


def check_with_megatron(tmp_path, dtype):
    from megatron.core.datasets import indexed_dataset as megatron

    tmp_path.mkdir()
    documents = [[5, 6, 7], [1], [], [9, 9, min(40_000, np.iinfo(dtype).max), 3]]
    write_shard(tmp_path / "ours", dtype, documents)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [part.tolist() for part in theirs] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        ours, theirs = ((tmp_path / f"{name}.{end}").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs
    found = IndexedDataset(tmp_path / "theirs")
    assert found.read().tolist() == [token for document in documents for token in document]
    assert (found.lengths.tolist(), found.ends.tolist()) == ([3, 1, 0, 4], [3, 4, 4, 8])
    assert (found.num_tokens, found.num_documents) == (8, 4)
    write_shard(tmp_path / "empty", dtype, [])
    assert IndexedDataset(tmp_path / "empty").num_tokens == 0


def index_of(lengths, borders):
    offsets = 2 * (np.cumsum(lengths) - lengths)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(borders))
    parts = (np.array(lengths, "<i4"), offsets.astype("<i8"), np.array(borders, "<i8"))
    return head + b"".join(part.tobytes() for part in parts)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("vocabulary", [119, 120])
def test_ids_are_rows_of_the_model(tmp_path, dtype, vocabulary):
    write_shard(tmp_path / "a", dtype, [[5, 6], [], [7, 119, 3]])
    corpus = Corpus.open(tmp_path)
    if vocabulary == 120:
        corpus.check_ids(vocabulary)
        return
    with pytest.raises(DataError, match=r"a\.bin', .* from 0 to 118, .* not 119 as token 3;"):
        corpus.check_ids(vocabulary)


LENGTHS, OFFSETS, BORDERS = 34, 34 + 5 * 4, 34 + 5 * (4 + 8)
"""Places in an index of five documents."""

FAULTS = [  # the end of a file's name, a place in it, the bytes there (None: it ends), the error
    ("bin", 49, None, "it was cut"),
    ("loss.bin", 24, None, "it was cut"),
    ("idx", 20, None, "Megatron's format"),
    ("bin", 0, b"\xff", "were changed"),
    ("idx", 0, index_of([5, 5, 5, 5, 6], range(6)), "is of another .bin"),
    ("idx", 17, b"\x63", "type 99"),
    ("idx", 18, struct.pack("<Q", 1 << 63), "9223372036854775808 sequences"),
    ("idx", LENGTHS + 16, struct.pack("<i", -4), "ends at"),
    ("idx", LENGTHS, struct.pack("<i", 4), "without gaps"),
    ("idx", BORDERS + 8, struct.pack("<q", 7), "one sequence each"),
]


@pytest.mark.parametrize(("end", "place", "data", "why"), FAULTS)
def test_a_fault_is_found_before_a_run(tmp_path, end, place, data, why):
    corpus, path = build(tmp_path, loss=True), tmp_path / f"train-00001.{end}"
    corpus.check()
    content = path.read_bytes()
    rest = b"" if data is None else data + content[place + len(data) :]
    path.write_bytes(content[:place] + rest)
    with pytest.raises(DataError, match=why) as found:
        Corpus.open(tmp_path).check()
    assert "\n" not in str(found.value)
    if why == "were changed":  # of a large corpus only `prepare --verify` finds it
        corpus.check(0)
        with pytest.raises(DataError, match=why):
            corpus.check(math.inf)


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(ConfigError, match=r"a folder with corpus\.json"):
        Corpus.open(tmp_path)
    build(tmp_path)
    path = tmp_path / "corpus.json"
    whole = path.read_text()
    for content, why in [
        (whole.replace('s": 25', 's": 24'), f"not those of its identity.*delete {tmp_path}"),
        (whole.replace('s": 25', 's": 1e999'), "a record of format"),
        (whole.replace("train-00000", "../../etc/passwd"), f"{tmp_path}/passwd.idx"),  # inside
        ("{", "a record of format"),
        ('{"format": "other"}', "a record of format"),
    ]:
        path.write_text(content)
        with pytest.raises(DataError, match=why):
            Corpus.open(tmp_path).check()
    path.rename(tmp_path / "preparing.json")
    with pytest.raises(ConfigError, match="a preparation that is finished"):
        Corpus.open(tmp_path)


def check_rows(rows, tokens, owners=None, targets=None):
    """Compare all rows with tokens (n, s + 1), whose documents, the owners, are kept apart."""
    tokens, owners = np.array(tokens), owners if owners is None else np.array(owners)
    inputs, labels = rows.read(np.arange(len(rows)))
    assert all(value.dtype == torch.int64 and value.is_contiguous() for value in inputs.values())
    assert np.array_equal(inputs["input"], tokens[:, :-1])
    kept = np.ones(labels.shape, dtype=bool) if targets is None else targets[:, 1:] > 0
    assert (DOCUMENTS in inputs) == (owners is not None)
    if owners is not None:
        kept &= owners[:, 1:] == owners[:, :-1]
        # Which tokens are of one document is all that the mask and the positions depend on.
        found = inputs[DOCUMENTS].numpy()
        same, wanted = (each[:, :, None] == each[:, None] for each in (found, owners[:, :-1]))
        assert np.array_equal(same, wanted)
        assert (np.diff(found) >= 0).all()
    assert np.array_equal(labels, np.where(kept, tokens[:, 1:], IGNORE_INDEX))


def documents_of(lengths):
    """Documents whose tokens are all different."""
    tokens = iter(range(1, 60000))
    return [[next(tokens) for _ in range(length)] for length in lengths]


def test_a_folder_of_another_writer(tmp_path):
    write_shard(tmp_path / "b", np.uint16, [[1] * 7, [2] * 3])
    tokens = np.arange(100, 120, dtype=np.uint16)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "a.idx").write_bytes(index_of([7, 5, 8], range(4)))
    corpus = Corpus.open(tmp_path)
    assert [(info.name, info.documents) for info in corpus.train] == [("a", 3), ("b", 2)]
    assert (corpus.tokens(), corpus.held_out, corpus.kind) == (30, [], "text")
    corpus.check()
    windows = [*tokens.reshape(2, 10), [1] * 7 + [2] * 3]
    owners = [[0] * 7 + [1] * 3, [1] * 2 + [2] * 8, [3] * 7 + [4] * 3]
    check_rows(Rows(corpus, 9, mask_documents=True), windows, owners)
    # Megatron's writers may cut a document into sequences, and forget to merge their borders.
    (tmp_path / "a.idx").write_bytes(index_of([7, 5, 8], [0, 2, 3]))
    with pytest.raises(DataError, match="one sequence per document"):
        Corpus.open(tmp_path)


SHARDS = st.lists(st.lists(st.integers(0, 2 * S), min_size=1, max_size=8), min_size=1, max_size=3)


@given(lengths=SHARDS, held_out=st.booleans(), masked=st.booleans())
@settings(max_examples=50, deadline=None)
def test_text_is_cut_and_its_documents_are_those_of_a_slow_reference(
    lengths, held_out, masked, tmp_path_factory
):
    shards = [documents_of(shard) for shard in lengths]
    parts = ([documents_of([3])], shards) if held_out else (shards, [documents_of([3])])
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"), *parts)
    for path in corpus.folder.glob("train-*" if held_out else "held_out-*"):
        path.unlink()  # the part that is not read is not opened
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
    check_rows(Rows(corpus, S, held_out, masked), windows, owners if masked else None)


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
    open_row = False
    pairs = zip(chain(*shards), chain(*masks), strict=True)
    for owner, (pair, mask) in enumerate(pairs):
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
    tokens, targets, owners = np.moveaxis(np.array(filled), 2, 0)
    check_rows(Rows(corpus, S), tokens, owners, targets)
