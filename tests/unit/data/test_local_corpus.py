# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Local files: whatever the blocks, every document comes exactly once."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan_lr.data import local_corpus, text_files
from torchtitan_lr.data.local_corpus import LocalCorpus
from torchtitan_lr.errors import ConfigError

KEY = "training.dataset_path"
TEXTS = [f"document {i} – ünïcödé 漢字 " + "lorem " * (i * 7 % 50) + "\n\tend" for i in range(90)]
# One longer than several blocks, so that some blocks have no line that starts in them.
TEXTS[40] = "long " * 3000


@pytest.fixture(params=[1, 17, 100, 1000, 1 << 20])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(local_corpus, "MIN_BLOCK_BYTES", 1)
    monkeypatch.setattr(local_corpus, "MAX_BLOCK_BYTES", request.param)
    return request.param


def write_jsonl(path, texts, end="\n"):
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    path.write_text(lines + end, encoding="utf-8")


def test_jsonl_blocks_partition_the_documents(tmp_path, block_bytes):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    write_jsonl(tmp_path / "b.jsonl", TEXTS[:3], end="")  # no line end behind the last
    (tmp_path / "c.jsonl").write_text("")
    corpus = LocalCorpus(str(tmp_path), KEY)
    assert corpus.num_blocks >= corpus._files[0][1] // block_bytes
    assert list(corpus) == TEXTS + TEXTS[:3]


def test_txt_blocks_partition_the_bytes(tmp_path, block_bytes):
    text = "\n".join(TEXTS) + "\r\nlast line without an end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"\n\nsmall\n")
    documents = list(LocalCorpus(str(tmp_path), KEY))
    assert "".join(documents) == text + "\n\nsmall\n"
    assert all(d.endswith(("\n", "last line without an end")) for d in documents)
    if block_bytes == 1 << 20:
        assert documents == [text, "\n\nsmall\n"]


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
@pytest.mark.parametrize("block_bytes", [60, 1000, 1 << 20], indirect=True)
def test_parquet_blocks_partition_the_rows(tmp_path, block_bytes, row_group_size):
    rows = [*TEXTS, None, ""]  # neither null nor empty text is a document
    table = pa.table({"id": range(len(rows)), "text": pa.array(rows, pa.string())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=row_group_size)
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    assert list(LocalCorpus(str(tmp_path / "*.parquet"), KEY)) == TEXTS


def test_a_reader_without_the_seam_rule_loses_or_repeats_lines(tmp_path, monkeypatch):
    """Negative control: reading just the bytes of a range breaks the partition."""
    monkeypatch.setattr(local_corpus, "MIN_BLOCK_BYTES", 1)
    monkeypatch.setattr(local_corpus, "MAX_BLOCK_BYTES", 100)
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))

    def raw(path, low, high):
        with path.open("rb") as file:
            file.seek(low)
            while file.tell() < high:
                yield file.tell(), file.readline()

    monkeypatch.setattr(text_files, "_lines", raw)
    assert "".join(LocalCorpus(str(tmp_path), KEY)) != "\n".join(TEXTS)


def test_fingerprint_knows_the_files_but_not_where_they_lie(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")
    here, there = (LocalCorpus(str(tmp_path / name), KEY) for name in ("here", "there"))
    assert here.fingerprint() == there.fingerprint()
    (tmp_path / "there" / "b.txt").write_text("more")
    assert here.fingerprint() != LocalCorpus(str(tmp_path / "there"), KEY).fingerprint()


@pytest.mark.parametrize(
    "bad", ['{"text": "no end', '{"other": "x"}', '{"text": 3}', "[1]", "5", '{"text": null}']
)
def test_a_bad_line_is_named(tmp_path, bad):
    good = json.dumps({"text": "fine"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{good}\n{bad}\n{good}\n")
    with pytest.raises(ConfigError) as error:
        list(LocalCorpus(str(tmp_path), KEY))
    text = str(error.value)
    assert KEY in text and "a.jsonl:4" in text and "\n" not in text


def test_bad_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "c.parquet")
    for name in ("a", "b", "c"):
        with pytest.raises(ConfigError, match=rf"{name}\.parquet.*column 'text'"):
            list(LocalCorpus(str(tmp_path / f"{name}.parquet"), KEY))


def test_nothing_to_read_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    for path, part in ((tmp_path, ".jsonl"), (tmp_path / "*.txt", "matches")):
        with pytest.raises(ConfigError, match=part):
            LocalCorpus(str(path), KEY)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        LocalCorpus(str(tmp_path), KEY)


def test_damaged_parquet_is_named(tmp_path):
    """Damage in the pages, which only a reader of the rows meets."""
    good = tmp_path / "good.parquet"
    rows = [f"{i} some text {i * i}" for i in range(5000)]
    pq.write_table(pa.table({"text": rows}), good, use_dictionary=False)
    assert list(LocalCorpus(str(good), KEY)) == rows  # the control
    data = bytearray(good.read_bytes())
    data[4:2000] = b"\xff" * 1996
    (tmp_path / "bad.parquet").write_bytes(data)
    (tmp_path / "short.parquet").write_bytes(good.read_bytes()[:-100])
    for name in ("bad", "short"):
        with pytest.raises(ConfigError, match=rf"{name}\.parquet.*intact parquet"):
            list(LocalCorpus(str(tmp_path / f"{name}.parquet"), KEY))
