# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Preparation: the tokens of each form of text, kills, faults of files and of disks."""

import bz2
import errno
import gzip
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.corpora import read_documents, write_jsonl
from tests.support.nightly import nightly
from tests.support.processes import in_child
from torchtitan_lr.data import sources
from torchtitan_lr.data import tokenize as tokenizing
from torchtitan_lr.data.corpus import PARTS
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.sources import USUAL_LIMIT, Reader, Source, document_hash
from torchtitan_lr.data.tokenize import LOCK, prepare_folder
from torchtitan_lr.data.tokenizer import Tokenizer
from torchtitan_lr.errors import ConfigError, DataError

TOKENIZER = Tokenizer("torchtitan_lr/data/assets/bpe4k")
TEXTS = [f"Document {i} of {i * i} words: {'more and ' * (i % 7)}\nend é." for i in range(400)]


def prepare(path, out, source=None, **options):
    source = source or Source("local", (str(path),))
    return prepare_folder([Reader(source)], TOKENIZER, out, "--out", **options)


def encoded(texts):
    return [TOKENIZER.encode(text, add_bos=True, add_eos=True) for text in texts]


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": partial(write_jsonl, opener=gzip.open),
    "a.jsonl.zst": partial(
        write_jsonl, opener=lambda path, _: pa.output_stream(str(path), compression="zstd")
    ),
    "a.jsonl.bz2": partial(write_jsonl, opener=bz2.open),
    "a.jsonl.xz": partial(write_jsonl, opener=lzma.open),
    "a.parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path, 64),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_document_is_in_its_part_and_in_order(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "SMALL_BYTES", 0)
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 4000)
    WRITERS[name](tmp_path / name, TEXTS)
    corpus = prepare(tmp_path / name, tmp_path / "out")
    held = [text for text in TEXTS if document_hash(text) < USUAL_LIMIT]
    assert held  # else one part is empty
    assert read_documents(corpus, held_out=True) == encoded(held)
    assert read_documents(corpus) == encoded([text for text in TEXTS if text not in held])
    assert len(corpus.train) > 3
    corpus.check()
    shards = [info.name for info in corpus.train + corpus.held_out]
    files = {name + end for name in shards for end in (".bin", ".idx")}
    assert {*os.listdir(tmp_path / "out")} - {LOCK} == files | {"corpus.json"}
    # What breaks off is never prepared in part; of lines that is one that cannot be read.
    path, cut = tmp_path / name, tmp_path / "cut"
    path.write_bytes(path.read_bytes()[:-20])
    want = r"a\.jsonl:400'" if name == "a.jsonl" else rf"{name}', .*does not break off"
    with pytest.raises(DataError, match=want):
        prepare(path, cut, max_bad_records=0 if name == "a.jsonl" else 1000)
    assert not (cut / "corpus.json").exists()


def test_pairs_have_a_mask_of_their_answers(tmp_path):
    pairs = [{"prompt": f"Q{i}: {i} + 1?", "completion": f" {i + 1}"} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    corpus = prepare(tmp_path / "a.jsonl", tmp_path / "out")
    found = []
    for part in (False, True):
        both = zip(
            read_documents(corpus, part), read_documents(corpus, part, loss=True), strict=True
        )
        found += [np.where(mask, ids, np.invert(ids)).tolist() for ids, mask in both]
    whole = [PairEncoder(TOKENIZER).encode(parse_pair(pair)).tolist() for pair in pairs]
    assert corpus.kind == "pairs" and sorted(found) == sorted(whole)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "files"])
def test_a_dataset_is_read(tmp_path, monkeypatch, streaming, saved):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    folder = tmp_path / "dataset"
    rows = datasets.Dataset.from_dict({"words": TEXTS, "n": range(len(TEXTS))})
    if saved:
        rows.save_to_disk(folder)
    else:
        folder.mkdir()
        rows.to_json(folder / "train.jsonl")
    source = Source("hf", (str(folder),), column="words", part="train", streaming=streaming)
    assert list(Reader(source).texts()) == TEXTS
    corpus = prepare(None, tmp_path / "out", replace(source, tokens=2000))
    assert 2000 <= corpus.tokens() < 3000 and not corpus.held_out
    found = read_documents(corpus)
    assert found == encoded(TEXTS[: len(found)])
    for column, want in (("text", "text_column: got 'text'"), ("n", "other values than text")):
        with pytest.raises(ConfigError, match=want):
            list(Reader(replace(source, column=column)).pieces())


def test_a_begun_preparation_stays_at_its_commit(tmp_path, monkeypatch):
    """Before its first unit, too: another machine takes it from there."""
    numbers, asked = count(), list[str]()

    def about(*_, **__):
        return SimpleNamespace(sha=f"commit {next(numbers)}")

    def load(*_, revision, **__):
        asked.append(revision)
        if len(asked) == 1:
            raise OSError("the network is gone")
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", about)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = Source("hf", ("owner/name",))
    with pytest.raises(DataError, match="the network is gone"):
        prepare(None, tmp_path, source)
    corpus = prepare(None, tmp_path, source)
    assert asked == ["commit 0"] * 2 and next(numbers) == 1
    assert corpus.record["sources"][0]["commit"] == "commit 0"


def test_bad_lines_are_counted_and_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines(keepends=True)
    bad = {7: b"{broken\n", 200: b'{"text": 3}\n', 399: b'{"text": "\xff"}\n'}
    path.write_bytes(b"".join(bad.get(i, line) for i, line in enumerate(lines)))
    with pytest.raises(DataError, match=r"a\.jsonl:8'[^\n]* first of 3 bad records"):
        prepare(path, tmp_path / "out", max_bad_records=2)
    # Nothing is tokenized again once they may be lost.
    monkeypatch.setattr(tokenizing, "encode_documents", None)
    corpus = prepare(path, tmp_path / "out", max_bad_records=3)
    listed = [line.split(": ")[0] for line in corpus.record["bad_records"]]
    assert listed == [f"{path}:{i + 1}" for i in bad]
    assert sum(info.documents for info in corpus.train + corpus.held_out) == 397


def decoded(corpus):
    parts = read_documents(corpus) + read_documents(corpus, held_out=True)
    return sorted(TOKENIZER.decode(part) for part in parts)


BOM = b"\xef\xbb\xbf"
LONG = b'{"text": "one"}\n{"text": "' + b"long " * 60 + b'"}\n{"text": "\xc3\xa9"}'
HALVES = b'{"text": "\\ud83d\\ude00"}\n{"text": "half \\ud83d of it"}\n{'
LOST = [  # name, content, the line that is lost, and the texts that are left
    ("a.txt", BOM + b"one and more\nl'\xe9t\xe9\nthree\n", 2, ["one and more\nthree\n"]),
    ("a.jsonl", BOM + b'{"text": "one"}\r\n\r\n{"text": "l\xe9"}\r\n', 3, ["one"]),
    ("a.jsonl", b'{"text": "one"}\n{"text": "\xed\xa0\xbd"}\n', 2, ["one"]),
    ("a.jsonl", LONG, 2, ["one", "\xe9"]),
    ("a.jsonl", HALVES, 3, ["half ? of it", "\U0001f600"]),
]


@pytest.mark.parametrize(("name", "content", "line", "left"), LOST)
def test_what_is_lost_is_a_counted_record(tmp_path, monkeypatch, name, content, line, left):
    monkeypatch.setattr(sources, "LONGEST", 200)
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"got '[^']*{name}:{line}', .*first of 1 bad records"):
        prepare(path, out)
    corpus = prepare(path, out, max_bad_records=1)
    assert corpus.record["bad_records"][0].startswith(f"{path}:{line}: expected ")
    assert decoded(corpus) == left


@pytest.mark.parametrize("text", ["some words " * 400, "\u5317\u4eac" * 900, "x" * 5000])
def test_a_long_line_of_txt_is_cut_and_whole(tmp_path, monkeypatch, text):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "PLACE_BYTES", 100)
    (tmp_path / "a.txt").write_text(f"{text}\nend\n", encoding="utf-8")
    reader = Reader(Source("local", (str(tmp_path),), part="train"))
    pieces = list(reader.pieces())
    assert "".join(reader.texts()) == f"{text}\nend\n"
    assert max(len(piece.data) for piece in pieces) <= 2000 and len(pieces) > 3


def test_a_folder_has_no_hidden_files_and_no_links_out_of_it(tmp_path):
    data = tmp_path / "data"
    for name in ("a", ".ipynb_checkpoints/a-checkpoint", "._a", "b.jsonl/c"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(data / f"{name}.jsonl", TEXTS[:9])
    (data / "loop").symlink_to(".")
    (data / "inside.jsonl").symlink_to("a.jsonl")
    wanted = [str(data / name) for name in ("a.jsonl", "b.jsonl/c.jsonl", "inside.jsonl")]
    for path in (data, f"{data}/**/*.jsonl"):
        assert [*map(str, Reader(Source("local", (str(path),))).files)] == wanted
    # A snapshot in the Hub's cache is made of links into the folder beside it.
    cache, snapshot = tmp_path / "datasets--a--b", tmp_path / "datasets--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    shutil.copy(data / "a.jsonl", cache / "blobs/0a")
    (snapshot / "train.jsonl").symlink_to("../../blobs/0a")
    assert len(Reader(Source("local", (str(snapshot),))).files) == 1
    # A folder of that name elsewhere is another's.
    shutil.copytree(cache / "blobs", tmp_path / "blobs")
    for target in ("../blobs/0a", "/etc/passwd"):
        link = data / "x.jsonl"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        for source, path in (("local", data), ("hf", data), ("local", data / "*")):
            with pytest.raises(ConfigError, match=r"x\.jsonl', .* a link to "):
                Reader(Source(source, (str(path),)))


def test_a_killed_preparation_loses_one_unit(tmp_path, monkeypatch):
    """It is killed at each write in turn; what it has made is made only once."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 7000)
    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 20_000)
    path, killed, whole = tmp_path / "a.jsonl", tmp_path / "killed", tmp_path / "whole"
    write_jsonl(path, TEXTS * 3)
    corpus = prepare(path, whole)
    assert len(corpus.train) >= 4

    def run(writes):
        """Prepare until so many writes have reached the disk."""

        def fsync(file, sync=os.fsync):
            return os.kill(os.getpid(), signal.SIGKILL) if next(left, None) is None else sync(file)

        left = iter(range(writes))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            return in_child(partial(prepare, path, killed))

    for writes in range(1, 99):
        if (code := run(writes)) == 0:
            break
        assert code == -signal.SIGKILL and not (killed / "corpus.json").exists()
    assert writes >= 5
    assert {file.name for file in killed.iterdir()} == {file.name for file in whole.iterdir()}
    assert all(file.read_bytes() == (whole / file.name).read_bytes() for file in killed.iterdir())
    # Of a second folder, units that are there are not encoded again.
    shutil.rmtree(killed)
    run(17)
    (killed / "corpus.json.tmp").write_text("{")  # as a kill leaves it
    units = [json.loads(file.read_text()) for file in sorted(killed.glob("unit-*"))]
    there = sum(unit[part]["documents"] for unit in units for part in PARTS if unit[part])
    documents, encode = list[str](), tokenizing.encode_documents

    def seen(tokenizer, texts):
        documents.extend(texts)
        return encode(tokenizer, texts)

    monkeypatch.setattr(tokenizing, "encode_documents", seen)
    assert prepare(path, killed).identity == corpus.identity
    assert len(units) >= 2 and len(documents) == len(TEXTS) * 3 - there
    assert {file.name for file in killed.iterdir()} == {file.name for file in whole.iterdir()}


CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a"}]}
HANGS = [(signal.SIGTERM, {"text": "a"}), *nightly((signal.SIGTERM, CHAT))]
"""In threads, and in the main one; a shell may have set SIGINT to be ignored."""


@pytest.mark.parametrize(("number", "record"), HANGS, ids=["text", "chats"])
def test_a_tokenizer_that_never_ends_is_stopped(tmp_path, number, record):
    folder = shutil.copytree("torchtitan_lr/data/assets/bpe4k", tmp_path / "tokenizer")
    rules = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    rules["pre_tokenizer"] = split | {"pattern": {"Regex": "a+(?<!a)"}}
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    if record is CHAT:
        form = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
        (folder / "chat_template.jinja").write_text(form)
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    line = json.dumps(record).replace('"a"', f'"{"a" * 600_000}"')
    path.write_text("".join(f"{line}\n" for _ in range(4)))
    command = [sys.executable, "-m", "torchtitan_lr", "prepare", path, "--out", out]
    with subprocess.Popen([*command, "--tokenizer", folder]) as process:
        while not (out / "preparing.json").exists():
            time.sleep(0.1)
            assert process.poll() is None
        time.sleep(3)
        assert process.poll() is None
        process.send_signal(number)
        try:
            assert process.wait(60) == -number
        finally:
            process.kill()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch, number):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def full(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"a folder that can be written .* goes on where"):
            prepare(path, tmp_path / "out")
    found = prepare(path, tmp_path / "out")
    assert found.identity == prepare(path, tmp_path / "other").identity
