# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Preparation: the tokens of each form of text, kills, faults of files and of disks."""

import gzip
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from threading import Thread
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import ROOT
from torchtitan_lr.data import sources
from torchtitan_lr.data import tokenize as tokenizing
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.rows import Rows
from torchtitan_lr.data.sources import USUAL_LIMIT, Reader, Source, document_hash
from torchtitan_lr.data.tokenize import tokenize
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError, DataError

MODEL = SimpleNamespace(hf_assets_path="torchtitan_lr/data/assets/bpe4k")
TOKENIZER = build_tokenizer(SimpleNamespace(model=MODEL))
TEXTS = [f"Document {i} of {i * i} words: {'more and ' * (i % 7)}\nend é." for i in range(400)]


def prepare(path, out, source=None, **options):
    source = source or Source("local", (str(path),))
    return tokenize([Reader(source)], TOKENIZER, out, key="--out", workers=2, **options)


def documents(corpus, held_out=False, loss=False):
    found = []
    for info in corpus.held_out if held_out else corpus.train:
        shard = corpus.shard(info, loss)
        found += [part.tolist() for part in np.split(shard.read(), shard.ends[:-1])]
    return found


def encoded(texts):
    return [TOKENIZER.encode(text, add_bos=True, add_eos=True) for text in texts]


def write_jsonl(path, texts, opener=open):
    with opener(path, "wb") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    return path


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": partial(write_jsonl, opener=gzip.open),
    "a.jsonl.zst": partial(
        write_jsonl, opener=lambda path, _: pa.output_stream(str(path), compression="zstd")
    ),
    "a.parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path, 64),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_document_is_in_its_part_and_in_order(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "SMALL_BYTES", 0)
    monkeypatch.setattr(tokenizing, "SHARD_BYTES", 4000)
    WRITERS[name](tmp_path / name, TEXTS)
    corpus = prepare(tmp_path / name, tmp_path / "out")
    held = [text for text in TEXTS if document_hash(text) < USUAL_LIMIT]
    assert held  # else one part is empty
    assert documents(corpus, held_out=True) == encoded(held)
    assert documents(corpus) == encoded([text for text in TEXTS if text not in held])
    assert len(corpus.train) > 3
    corpus.check()
    shards = [info.name for info in corpus.train + corpus.held_out]
    files = {name + end for name in shards for end in (".bin", ".idx")}
    assert {*os.listdir(tmp_path / "out")} == files | {"corpus.json"}
    # What breaks off is never prepared in part; of lines that is one that cannot be read.
    path, cut = tmp_path / name, tmp_path / "cut"
    path.write_bytes(path.read_bytes()[:-20])
    want = r"a\.jsonl:400'" if name == "a.jsonl" else rf"{name}', .*does not break off"
    with pytest.raises(DataError, match=want):
        prepare(path, cut, max_bad_records=0 if name == "a.jsonl" else 1000)
    assert not (cut / "corpus.json").exists()


def test_a_small_corpus_holds_out_some(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:40])
    corpus = prepare(tmp_path / "a.jsonl", tmp_path / "out")
    held = documents(corpus, held_out=True)
    assert 1 <= len(held) <= 8
    lowest = sorted(TEXTS[:40], key=document_hash)[: len(held)]
    assert sorted(held) == sorted(encoded(lowest))


def test_txt_is_cut_where_the_other_part_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PLACE_BYTES", 100)
    text = "".join(f"line {i} of the text\n" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare(tmp_path / "a.txt", tmp_path / "out")
    parts = [documents(corpus), documents(corpus, held_out=True)]
    assert all(parts)
    decoded = [TOKENIZER.decode(part) for each in parts for part in each]
    lines = [line for part in decoded for line in part.splitlines() if line]
    assert sorted(lines) == sorted(text.splitlines())


def test_pairs_have_a_mask_of_their_answers(tmp_path):
    pairs = [{"prompt": f"Q{i}: {i} + 1?", "completion": f" {i + 1}"} for i in range(60)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in pairs)
    corpus = prepare(tmp_path / "a.jsonl.gz", tmp_path / "out")
    found = {
        tuple(ids): mask
        for part in (False, True)
        for ids, mask in zip(documents(corpus, part), documents(corpus, part, True), strict=True)
    }
    for pair in pairs:
        whole = PairEncoder(TOKENIZER).encode(parse_pair(pair)).tolist()
        ids = tuple(token if token >= 0 else ~token for token in whole)
        assert found.pop(ids) == [int(token >= 0) for token in whole]
    assert corpus.kind == "pairs" and not found


def test_the_library_holds_out_one_file_in_twenty(tmp_path, monkeypatch):
    for i in range(60):
        path = tmp_path / f"lib/pkg{i % 3}/m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'def f{i}(x):\n    """Add {i}."""\n    return x + {i}\n')
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    text = prepare(None, tmp_path / "text", source=Source("python_stdlib"))
    docs = prepare(None, tmp_path / "docs", source=Source("python_stdlib_docs"))
    train, held_out = documents(text), documents(text, held_out=True)
    assert len(train) + len(held_out) == 60 and 0 < len(held_out) < 10
    # What is held out of the pairs is not in the text that is trained on.
    held = [TOKENIZER.decode(ids).split("(")[0] for ids in documents(docs, held_out=True)]
    assert docs.kind == "pairs" and len(held) == len(held_out)
    assert not any(f"{name}(" in TOKENIZER.decode(ids) for name in held for ids in train)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "files"])
def test_a_dataset_is_read_and_gone_on_with(tmp_path, monkeypatch, streaming, saved):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    folder = tmp_path / "dataset"
    rows = datasets.Dataset.from_dict({"words": TEXTS, "n": range(len(TEXTS))})
    if saved:
        rows.save_to_disk(folder)
    else:
        folder.mkdir()
        rows.to_json(folder / "train.jsonl")
    source = Source("hf", (str(folder),), column="words", part="train", streaming=streaming)
    reader = Reader(source)
    pieces = list(reader.pieces())
    texts = [reader.documents(piece)[0][0] for piece in pieces]
    assert list(chain(*texts)) == TEXTS and len(pieces) > 5
    # From the place behind the third piece: what a killed preparation goes on with.
    rest = reader.pieces(json.loads(json.dumps(pieces[2].position)))
    assert [reader.documents(piece)[0][0] for piece in rest] == texts[3:]
    corpus = prepare(None, tmp_path / "out", replace(source, tokens=2000))
    assert 2000 <= corpus.tokens() < 3000 and not corpus.held_out
    found = documents(corpus)
    assert found == encoded(TEXTS[: len(found)])
    for column, want in (("text", "text_column: got 'text'"), ("n", "other values than text")):
        with pytest.raises(ConfigError, match=want):
            list(Reader(replace(source, column=column)).pieces())


def test_every_bad_line_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines(keepends=True)
    bad = {7: b"{broken\n", 200: b'{"text": 3}\n', 399: b'{"text": "\xff"}\n'}
    path.write_bytes(b"".join(bad.get(i, line) for i, line in enumerate(lines)))
    with pytest.raises(DataError, match=r"a\.jsonl:8'.*3 records") as error:
        prepare(path, tmp_path / "out", max_bad_records=2)
    assert "\n" not in str(error.value)
    listed = (tmp_path / "out" / "bad_records.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{path}:{i + 1}" for i in bad]
    # Nothing is tokenized again once they may be lost.
    monkeypatch.setattr(tokenizing, "_encode", None)
    corpus = prepare(path, tmp_path / "out", max_bad_records=3)
    assert len(corpus.record["bad_records"]) == 3
    assert sum(info.documents for info in corpus.train + corpus.held_out) == 397


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("words and words".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        prepare(tmp_path / "a.txt", tmp_path / "out")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="column 'text'"):
        prepare(tmp_path / "b.parquet", tmp_path / "out")
    with pytest.raises(ConfigError, match="an existing file"):
        prepare(tmp_path / "missing.txt", tmp_path / "out")


def in_child(function, *arguments):
    """Call a function in a session of its own. Return its exit code."""
    child = multiprocessing.get_context("fork").Process(
        target=lambda: (os.setsid(), function(*arguments))
    )
    child.start()
    child.join()
    for _ in range(100):  # no process outlives a killed preparation
        if not subprocess.run(["pgrep", "-s", str(child.pid)], capture_output=True).stdout:
            return child.exitcode
        time.sleep(0.1)
    raise AssertionError(f"processes of session {child.pid} live on")


def test_a_killed_preparation_goes_on_and_gives_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 2000)
    monkeypatch.setattr(tokenizing, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(tokenizing, "SHARD_BYTES", 30_000)
    path, killed, whole = tmp_path / "a.jsonl", tmp_path / "killed", tmp_path / "whole"
    write_jsonl(path, TEXTS * 3)
    assert in_child(prepare, path, whole) == 0
    positions = []
    for pieces in range(10):
        done = iter(range(pieces))

        def report(*_, done=done):
            if next(done, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(partial(prepare, report=report), path, killed) == -signal.SIGKILL
        assert not (killed / "corpus.json").exists()
        if pieces:
            positions.append(str(json.loads((killed / "preparing.json").read_text())["position"]))
    assert len(set(positions)) == 9  # it had got somewhere each time
    assert in_child(prepare, path, killed) == 0
    first, second = (
        {file.name: file.read_bytes() for file in f.iterdir()} for f in (killed, whole)
    )
    assert first == second


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))  # as a disk that ends there
        with pytest.raises(ConfigError, match=r"^--out.*a folder that can be written.*\)$"):
            prepare(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    found = prepare(path, tmp_path / "out")
    assert found.identity == prepare(path, tmp_path / "other").identity


def test_few_descriptors_suffice_for_many_files_and_shards(tmp_path):
    """``ulimit -n 128``: 200 files are prepared as 200 shards, and their rows are read."""
    texts = [text * 20 for text in TEXTS[:200]]
    for index, text in enumerate(texts):
        write_jsonl(tmp_path / f"{index:03d}.jsonl", [text])

    def run():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        tokenizing.SHARD_BYTES = 2
        corpus = prepare(None, tmp_path / "out", Source("local", (str(tmp_path),), part="train"))
        assert len(corpus.train) == 200
        corpus.check()
        rows = Rows(corpus, 15)
        inputs = rows.read(np.arange(len(rows)))[0]["input"]
        wanted = np.concatenate(encoded(texts))[: len(rows) * 16].reshape(-1, 16)
        assert np.array_equal(inputs, wanted[:, :-1])

    assert in_child(run) == 0


COMMIT, ASKED = "0123456789" * 4, []


class Hub(BaseHTTPRequestHandler):
    """Serves one dataset, whose branch ``main`` is at a commit once, and then at another."""

    text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)

    def do_GET(self):
        body, name = "", self.path.rpartition("/")[2]
        if "/revision/" in self.path:
            commit = name if name != "main" else "f" * 40 if self.path in ASKED else COMMIT
            files = [{"rfilename": "a.jsonl"}]
            body = json.dumps({"id": "owner/name", "sha": commit, "siblings": files})
        elif "/tree/" in self.path:
            size = len(self.text.encode())
            body = json.dumps([{"type": "file", "path": "a.jsonl", "size": size, "oid": "0"}])
        elif name == "a.jsonl":
            body = self.text
        ASKED.append(self.path)
        self.send_response(200 if body else 404)
        self.send_header("ETag" if body else "X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    do_HEAD = do_GET


@pytest.mark.nightly
def test_the_record_has_the_commit_of_the_hub_that_was_read(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "torchtitan_lr", "prepare", "hf:owner/name@main"]
    command += [f"--tokenizer={MODEL.hf_assets_path}", f"--out={tmp_path}/out"]
    subprocess.run(command, cwd=ROOT, env=os.environ | own, check=True)
    server.shutdown()
    corpus = Corpus.open(tmp_path / "out")
    assert [source["commit"] for source in corpus.record["sources"]] == [COMMIT]
    found = documents(corpus) + documents(corpus, held_out=True)
    assert sorted(found) == sorted(encoded(TEXTS))
    read = {path for path in ASKED if path.endswith("/a.jsonl")}
    assert read == {f"/datasets/owner/name/resolve/{COMMIT}/a.jsonl"}
