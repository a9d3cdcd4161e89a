# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What local files hold out: the same documents whatever the batch, and never none of them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan_lr.data import local_corpus
from torchtitan_lr.data.held_out import document_hash
from torchtitan_lr.data.local_corpus import LocalCorpus

KEY = "training.dataset_path"
ROWS = (None, 1, 32, 5000)


def documents(n):
    return [f"document {i} " + "word " * (i * 7 % 90) for i in range(n)]


def write(folder, kind, texts):
    folder.mkdir(exist_ok=True)
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=50)
    else:
        for i, text in enumerate(texts):
            (folder / f"{i:05}.txt").write_text(text)
    return str(folder)


def halves(path, rows=None):
    return [list(LocalCorpus(path, KEY, rows, split)) for split in ("train", "validation")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_documents_are_parted_alike_for_every_batch(tmp_path, kind):
    texts = documents(400)
    path = write(tmp_path / "corpus", kind, texts)
    assert list(LocalCorpus(path, KEY)) == texts
    train, held = halves(path)
    assert sorted(train + held) == sorted(texts)
    assert not set(train) & set(held)
    assert 4 <= len(held) <= 60
    for rows in ROWS:
        assert halves(path, rows) == [train, held]


def test_a_large_corpus_holds_out_one_document_in_two_hundred(tmp_path, monkeypatch):
    monkeypatch.setattr(local_corpus, "SMALL_BYTES", 0)
    texts = [f"number {i}" for i in range(20_000)]
    train, held = halves(write(tmp_path / "corpus", "jsonl", texts))
    assert held == [text for text in texts if document_hash(text) * 200 < 1 << 64]
    assert len(train) + len(held) == len(texts)
    assert 60 < len(held) < 140  # 100 expected, 10 is the standard deviation


def test_copies_of_a_document_are_on_one_side(tmp_path):
    texts = documents(60)
    once = halves(write(tmp_path / "once", "jsonl", texts))
    train, held = halves(write(tmp_path / "thrice", "jsonl", texts * 3))
    assert not set(train) & set(held)
    assert held and len(train) + len(held) == 180
    assert once[1]


@pytest.mark.parametrize("n", [2, 3, 10, 50])
def test_a_small_corpus_holds_something_out(tmp_path, n):
    texts = [f"short {i}" for i in range(n)]
    train, held = halves(write(tmp_path / "corpus", "jsonl", texts))
    assert len(train) + len(held) == n
    assert len(held) == max(1, -(-n // 10))
