# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Megatron's format, against megatron-core's own reader and writer, and hostile files."""

import struct

import numpy as np
import pytest

from tests.support.corpora import write_shard
from torchtitan_lr.data.corpus import IndexedDataset
from torchtitan_lr.errors import DataError

DOCUMENTS = [[5, 6, 7], [1], [], [9, 9, 40_000, 3]]
HEADER = 34


def test_tokens_lengths_and_ends_of_a_file_of_ours(tmp_path):
    write_shard(tmp_path / "a", np.uint16, DOCUMENTS)
    found = IndexedDataset(tmp_path / "a")
    assert found.read().tolist() == [5, 6, 7, 1, 9, 9, 40_000, 3]
    assert (found.lengths.tolist(), found.ends.tolist()) == ([3, 1, 0, 4], [3, 4, 4, 8])
    assert (found.num_tokens, found.num_documents, found.num_sequences) == (8, 4, 4)
    found.check()
    write_shard(tmp_path / "b", np.uint16, [])
    assert IndexedDataset(tmp_path / "b").num_tokens == 0


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8])
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    documents = [[token % 200 for token in document] for document in DOCUMENTS if document]
    write_shard(tmp_path / "ours", dtype, documents)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [part.tolist() for part in theirs] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        ours, theirs = ((tmp_path / f"{name}.{end}").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs


@pytest.mark.parametrize(
    ("offset", "data", "why"),
    [
        (0, b"XX", "Megatron's format"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x63", "type 99"),
        (17, b"\x07", "type 7"),  # float32
        (18, struct.pack("<Q", 1 << 63), "9223372036854775808 sequences"),
        (18, struct.pack("<Q", (1 << 64) - 1), "sequences"),
        (26, struct.pack("<Q", 1 << 63), "borders"),
        (26, struct.pack("<Q", 0), "borders"),
        (HEADER + 12, struct.pack("<i", -4), "ends at"),  # the last length
        (HEADER + 16 + 24, struct.pack("<q", 1 << 62), "ends at"),  # the last offset
        (HEADER, struct.pack("<i", -1), "at least 0"),
        (HEADER, struct.pack("<i", 4), "without gaps"),
        (HEADER + 16 + 8, struct.pack("<q", -(1 << 40)), "without gaps"),
        (HEADER + 48 + 8, struct.pack("<q", 7), "borders of documents"),
        (HEADER + 48 + 32, struct.pack("<q", 1 << 40), "borders of documents"),
    ],
)
def test_a_hostile_index_is_refused(tmp_path, offset, data, why):
    write_shard(tmp_path / "a", np.uint16, DOCUMENTS)
    with (tmp_path / "a.idx").open("r+b") as file:
        file.seek(offset)
        file.write(data)
    with pytest.raises(DataError, match=why) as found:
        IndexedDataset(tmp_path / "a").check()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("end", "size"), [("bin", 15), ("bin", 14), ("idx", 60), ("idx", 20)])
def test_a_file_that_was_cut_is_refused(tmp_path, end, size):
    write_shard(tmp_path / "a", np.uint16, DOCUMENTS)
    path = tmp_path / f"a.{end}"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="it was cut" if end == "bin" else "format|intact index"):
        IndexedDataset(tmp_path / "a")
