# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compressed .txt and .jsonl files hold the same text as plain ones."""

import json

import pyarrow as pa
import pytest

from torchtitan_lr.data.local_corpus import LocalCorpus
from torchtitan_lr.data.text_files import lines_of
from torchtitan_lr.errors import DataError

CODECS = {".gz": "gzip", ".zst": "zstd"}
TEXTS = [f"document {i} with\rreturns " + "some words " * (i * 7 % 29) for i in range(700)]
JSONL = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode()


def write(path, data):
    with pa.output_stream(str(path), compression=CODECS.get(path.suffix)) as out:
        out.write(data)
    return path


def whole(path, split="all", rows=4, **options):
    return list(LocalCorpus(str(path), "training.dataset_path", rows, split, **options))


@pytest.mark.parametrize("suffix", CODECS)
def test_jsonl(tmp_path, suffix):
    plain = whole(write(tmp_path / "a.jsonl", JSONL), column="body")
    path = write(tmp_path / f"b.jsonl{suffix}", JSONL)
    assert sorted(whole(path, column="body")) == sorted(plain) == sorted(TEXTS)
    trained, held = (whole(path, split, column="body") for split in ("train", "validation"))
    assert held and sorted(trained + held) == sorted(TEXTS)
    # Documents are held out by their text, however they are stored.
    assert sorted(held) == sorted(whole(tmp_path / "a.jsonl", "validation", column="body"))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_line_is_in_one_part(tmp_path, count):
    path = write(tmp_path / "a.jsonl.zst", JSONL + b"the last line without an end")
    parts = [list(lines_of(path, path.stat().st_size, i, count)) for i in range(count)]
    lines = sorted(line for part in parts for line in part)
    assert b"".join(line for _, line in lines) == JSONL + b"the last line without an end"
    assert [start for start, _ in lines] == [
        sum(len(line) for _, line in lines[:i]) for i in range(len(lines))
    ]
    assert all(parts)


def test_errors_name_the_line(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", JSONL.replace(b'"body": "document 300 ', b'"body: "x'))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:301', expected a JSON object"):
        whole(path, column="body")
    damaged = tmp_path / "b.jsonl.zst"
    write(damaged, JSONL)
    data = damaged.read_bytes()
    damaged.write_bytes(data[: len(data) // 2] + bytes(40) + data[len(data) // 2 + 40 :])
    with pytest.raises(DataError, match="a readable file"):
        whole(damaged, column="body")
