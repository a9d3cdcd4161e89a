# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Preparation: the tokens of each form of text, kills, faults of files and of disks."""

import gzip
import json
import multiprocessing
import os
import resource
import signal
from dataclasses import replace
from functools import partial
from itertools import chain

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.corpora import read_documents, write_jsonl
from torchtitan_lr.data import sources
from torchtitan_lr.data import tokenize as tokenizing
from torchtitan_lr.data.corpus import Rows
from torchtitan_lr.data.pairs import PairEncoder, parse_pair
from torchtitan_lr.data.sources import USUAL_LIMIT, Reader, Source, document_hash
from torchtitan_lr.data.tokenize import tokenize
from torchtitan_lr.data.tokenizer import Tokenizer
from torchtitan_lr.errors import ConfigError, DataError

TOKENIZER = Tokenizer("torchtitan_lr/data/assets/bpe4k")
TEXTS = [f"Document {i} of {i * i} words: {'more and ' * (i % 7)}\nend é." for i in range(400)]


def prepare(path, out, source=None, **options):
    source = source or Source("local", (str(path),))
    return tokenize([Reader(source)], TOKENIZER, out, key="--out", workers=2, **options)


def encoded(texts):
    return [TOKENIZER.encode(text, add_bos=True, add_eos=True) for text in texts]


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
    assert read_documents(corpus, held_out=True) == encoded(held)
    assert read_documents(corpus) == encoded([text for text in TEXTS if text not in held])
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


def test_a_small_corpus_holds_out_the_lowest_hashes(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:40])
    held = read_documents(prepare(tmp_path / "a.jsonl", tmp_path / "out"), held_out=True)
    assert 1 <= len(held) <= 8
    lowest = sorted(TEXTS[:40], key=document_hash)[: len(held)]
    assert sorted(held) == sorted(encoded(lowest))


def test_txt_is_cut_where_the_other_part_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PLACE_BYTES", 100)
    lines = [f"line {i} of the text\n" for i in range(300)]
    (tmp_path / "a.txt").write_text("".join(lines))
    corpus = prepare(tmp_path / "a.txt", tmp_path / "out")
    parts = [read_documents(corpus), read_documents(corpus, held_out=True)]
    found = [TOKENIZER.decode(part) for part in chain(*parts)]
    assert all(parts) and sorted(chain(*(part.splitlines(True) for part in found))) == sorted(lines)


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


def test_the_library_holds_out_one_file_in_twenty(tmp_path, small_library):
    corpus = prepare(None, tmp_path, source=Source("python_stdlib"))
    assert (len(read_documents(corpus)), len(read_documents(corpus, held_out=True))) == (45, 15)


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
    found = read_documents(corpus)
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


@pytest.mark.parametrize(
    ("name", "want"),
    [("a.txt", "UTF-16"), ("b.parquet", "column 'text'"), ("no.txt", "an existing file")],
)
def test_what_is_no_text(tmp_path, name, want):
    (tmp_path / "a.txt").write_bytes("words and words".encode("utf-16"))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=want):
        prepare(tmp_path / name, tmp_path / "out")


def in_child(function):
    """Call a function in a child. Return its exit code when no process of it lives."""
    context = multiprocessing.get_context("fork")
    left, held = context.Pipe(duplex=False)
    child = context.Process(target=function)
    child.start()
    held.close()
    child.join()
    assert left.poll(10)  # all that inherited the other end have closed it
    return child.exitcode


def test_a_killed_preparation_goes_on_and_gives_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 7000)
    monkeypatch.setattr(tokenizing, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(tokenizing, "SHARD_BYTES", 30_000)
    path, killed, whole = tmp_path / "a.jsonl", tmp_path / "killed", tmp_path / "whole"
    write_jsonl(path, TEXTS * 3)
    assert in_child(partial(prepare, path, whole)) == 0
    for kills in range(99):
        left = iter(range(kills))  # of the writes that reach the disk before it is killed

        def fsync(file, sync=os.fsync, left=left):
            return os.kill(os.getpid(), signal.SIGKILL) if next(left, None) is None else sync(file)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            code = in_child(partial(prepare, path, killed))
        if code == 0:
            break
        assert code == -signal.SIGKILL and not (killed / "corpus.json").exists()
    assert kills >= 10
    assert {file.name for file in killed.iterdir()} == {file.name for file in whole.iterdir()}
    assert all(file.read_bytes() == (whole / file.name).read_bytes() for file in killed.iterdir())


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def run():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))  # as a disk that ends there
        with pytest.raises(ConfigError, match=r"^--out.*a folder that can be written.*\)$"):
            prepare(path, tmp_path / "out")

    assert in_child(run) == 0
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
