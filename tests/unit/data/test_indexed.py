# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Megatron's format, against megatron-core's own reader and writer, and hostile files."""

import struct

import numpy as np
import pytest

from torchtitan_lr.data.indexed import IndexedDataset, IndexedWriter
from torchtitan_lr.errors import DataError

DOCUMENTS = [[5, 6, 7], [1], [], [9, 9, 40_000, 3]]
HEADER = 34


def write(prefix, dtype=np.uint16, documents=DOCUMENTS):
    writer = IndexedWriter(prefix, dtype)
    for document in documents:
        writer.append(np.array(document, dtype=dtype), np.array([len(document)]))
    writer.finish()
    return IndexedDataset(prefix)


def assert_same_files(first, second):
    for suffix in (".bin", ".idx"):
        assert first.with_suffix(suffix).read_bytes() == second.with_suffix(suffix).read_bytes()


def test_tokens_lengths_and_ends_of_a_file_of_ours(tmp_path):
    found = write(tmp_path / "a")
    assert found.read().tolist() == [5, 6, 7, 1, 9, 9, 40_000, 3]
    assert (found.lengths.tolist(), found.ends.tolist()) == ([3, 1, 0, 4], [3, 4, 4, 8])
    assert (found.num_tokens, found.num_documents, found.num_sequences) == (8, 4, 4)
    found.check()
    assert write(tmp_path / "b", documents=[]).num_tokens == 0


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8])
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    documents = [[token % 200 for token in document] for document in DOCUMENTS if document]
    write(tmp_path / "ours", dtype, documents)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [part.tolist() for part in theirs] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_a_writer_goes_on_behind_what_it_keeps(tmp_path):
    write(tmp_path / "whole")
    first = IndexedWriter(tmp_path / "cut", np.uint16)
    first.append(np.array([5, 6, 7, 1, 2, 2]), np.array([3, 1, 2]))
    first.close()
    second = IndexedWriter(tmp_path / "cut", np.uint16, documents=2, tokens=4)
    second.append(np.array(DOCUMENTS[3]), np.array([0, 4]))
    second.finish()
    assert_same_files(tmp_path / "cut", tmp_path / "whole")


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
    write(tmp_path / "a")
    with (tmp_path / "a.idx").open("r+b") as file:
        file.seek(offset)
        file.write(data)
    with pytest.raises(DataError, match=why) as found:
        IndexedDataset(tmp_path / "a").check()
    assert "\n" not in str(found.value)


def test_cut_and_foreign_files_are_refused(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", documents=[[1], [2, 3]])
    for name, size in (("a.bin", 15), ("a.bin", 14), ("a.idx", 60), ("a.idx", 20)):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:size])
        with pytest.raises(DataError):
            IndexedDataset(tmp_path / "a")
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
    with pytest.raises(DataError, match="index is of another"):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match="a readable pair"):
        IndexedDataset(tmp_path / "a")
