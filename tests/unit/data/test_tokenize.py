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
from threading import Thread
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import ROOT
from torchtitan_lr.data import sources
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.rows import Rows
from torchtitan_lr.data.sources import USUAL_LIMIT, Reader, Source, document_hash
from torchtitan_lr.data.tokenize import tokenize
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError, DataError

TOKENIZER = build_tokenizer(
    SimpleNamespace(model=SimpleNamespace(hf_assets_path="torchtitan_lr/data/assets/bpe4k"))
)
TEXTS = [f"Document {i} of {i * i} words: {'more and ' * (i % 7)}\nend é." for i in range(400)]


def prepare(path, out, **options):
    source = options.pop("source", None) or Source("local", (str(path),))
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
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def write_zst(path, texts):
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": partial(write_jsonl, opener=gzip.open),
    "a.jsonl.zst": write_zst,
    "a.parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path, 64),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_document_is_in_its_part_and_in_order(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "SMALL_BYTES", 0)
    WRITERS[name](tmp_path / name, TEXTS)
    corpus = prepare(tmp_path / name, tmp_path / "out", shard_bytes=4000)
    held = [text for text in TEXTS if document_hash(text) < USUAL_LIMIT]
    assert held  # else one part is empty
    assert documents(corpus, held_out=True) == encoded(held)
    assert documents(corpus) == encoded([text for text in TEXTS if text not in held])
    assert len(corpus.train) > 3
    corpus.check()
    shards = [info.name for info in corpus.train + corpus.held_out]
    files = {name + end for name in shards for end in (".bin", ".idx")}
    assert {*os.listdir(tmp_path / "out")} == files | {"corpus.json"}


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


def test_tokens_end_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    source = Source("local", (str(tmp_path / "a.jsonl"),), part="train", tokens=2000)
    corpus = prepare(None, tmp_path / "out", source=source)
    assert 2000 <= corpus.tokens() < 3000
    found = documents(corpus)
    assert found == encoded(TEXTS[: len(found)])
    assert not corpus.held_out


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "files"])
def test_a_dataset_is_read_and_gone_on_with(tmp_path, monkeypatch, streaming, saved):
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    folder = tmp_path / "dataset"
    if saved:
        datasets.Dataset.from_dict({"words": TEXTS}).save_to_disk(folder)
    else:
        folder.mkdir()
        lines = (json.dumps({"words": text, "n": i}) + "\n" for i, text in enumerate(TEXTS))
        (folder / "train.jsonl").write_text("".join(lines))
    source = Source("hf", (str(folder),), column="words", split="train", streaming=streaming)
    reader = Reader(replace(source, part="train"))
    pieces = list(reader.pieces())
    found = [text for piece in pieces for text, _ in reader.documents(piece)]
    assert found == TEXTS and len(pieces) > 5
    # From the place behind the third piece: what a killed preparation goes on with.
    done = len([text for piece in pieces[:3] for text, _ in reader.documents(piece)])
    rest = reader.pieces(json.loads(json.dumps(pieces[2].position)))
    assert [text for piece in rest for text, _ in reader.documents(piece)] == TEXTS[done:]
    with pytest.raises(ConfigError, match="text_column: got 'text'"):
        list(Reader(replace(source, column="text")).pieces())


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
    monkeypatch.setattr("torchtitan_lr.data.tokenize._encode", None)
    corpus = prepare(path, tmp_path / "out", max_bad_records=3)
    assert len(corpus.record["bad_records"]) == 3
    assert sum(info.documents for info in corpus.train + corpus.held_out) == 397


def test_a_file_that_breaks_off_stops_it(tmp_path):
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        path, out = tmp_path / name, tmp_path / f"{name}.out"
        WRITERS[name](path, TEXTS)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match="does not break off") as error:
            prepare(path, out, max_bad_records=1000)
        assert str(path) in str(error.value) and not (out / "corpus.json").exists()


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


def prepare_until_killed(path, out, pieces=None):
    """SIGKILL this process after so many pieces."""

    def report(documents, tokens, share):
        nonlocal pieces
        if pieces is not None:
            pieces -= 1
            if pieces < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    report(0, 0, 0)
    prepare(path, out, shard_bytes=30_000, report=report)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_preparation_goes_on_and_gives_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 2000)
    monkeypatch.setattr("torchtitan_lr.data.tokenize.SYNC_SECONDS", 0.0)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 3)
    assert in_child(prepare_until_killed, path, tmp_path / "whole") == 0
    positions = []
    for pieces in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
        code = in_child(prepare_until_killed, path, tmp_path / "killed", pieces)
        assert code == -signal.SIGKILL
        assert not (tmp_path / "killed" / "corpus.json").exists()
        journal = tmp_path / "killed" / "preparing.json"
        positions.append(json.loads(journal.read_text())["position"] if pieces > 1 else None)
    assert len({str(position) for position in positions}) == 9  # it had got somewhere each time
    assert in_child(prepare_until_killed, path, tmp_path / "killed") == 0
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))  # as a disk that ends there
        with pytest.raises(ConfigError, match=r"--out.*a folder that can be written") as error:
            prepare(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(error.value)
    found = prepare(path, tmp_path / "out")
    assert found.identity == prepare(path, tmp_path / "other").identity


def test_few_descriptors_suffice_for_many_files_and_shards(tmp_path):
    """``ulimit -n 128``: 200 files are prepared as 200 shards, and their rows are read."""
    texts = [text * 20 for text in TEXTS[:200]]
    for index, text in enumerate(texts):
        write_jsonl(tmp_path / f"{index:03d}.jsonl", [text])

    def run():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        source = Source("local", (str(tmp_path),), part="train")
        corpus = prepare(None, tmp_path / "out", source=source, shard_bytes=2)
        assert len(corpus.train) == 200
        corpus.check()
        rows = Rows(corpus, 15)
        inputs = rows.read(np.arange(len(rows)))[0]["input"]
        wanted = np.concatenate(encoded(texts))[: len(rows) * 16].reshape(-1, 16)
        assert np.array_equal(inputs, wanted[:, :-1])

    assert in_child(run) == 0


COMMIT, ASKED = "0123456789" * 4, set()


class Hub(BaseHTTPRequestHandler):
    """Serves one dataset, whose branch ``main`` is at a commit once, and then at another."""

    text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)

    def do_GET(self):
        body = ""
        if "/revision/" in self.path:
            name = self.path.rpartition("/")[2]
            sha = name if name != "main" else "f" * 40 if self.path in ASKED else COMMIT
            about = {"id": "owner/name", "sha": sha, "siblings": [{"rfilename": "a.jsonl"}]}
            body = json.dumps(about)
        elif "/tree/" in self.path:
            size = len(self.text.encode())
            body = json.dumps([{"type": "file", "path": "a.jsonl", "size": size, "oid": "0"}])
        elif self.path.endswith("/a.jsonl"):
            body = self.text
        ASKED.add(self.path)
        self.send_response(200 if body else 404)
        self.send_header("ETag" if body else "X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.nightly
def test_the_record_has_the_commit_of_the_hub_that_was_read(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "torchtitan_lr", "prepare", "hf:owner/name@main"]
    command += ["--tokenizer=torchtitan_lr/data/assets/bpe4k", f"--out={tmp_path}/out"]
    subprocess.run(command, cwd=ROOT, env=os.environ | own, check=True)
    server.shutdown()
    corpus = Corpus.open(tmp_path / "out")
    assert [source["commit"] for source in corpus.record["sources"]] == [COMMIT]
    found = documents(corpus) + documents(corpus, held_out=True)
    assert sorted(found) == sorted(encoded(TEXTS))
    read = {path for path in ASKED if path.endswith("/a.jsonl")}
    assert read == {f"/datasets/owner/name/resolve/{COMMIT}/a.jsonl"}
