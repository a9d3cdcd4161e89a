# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The record of a prepared folder, and the faults that it finds."""

import json
import os
import shutil

import numpy as np
import pytest

from torchtitan_lr.data.corpus import Corpus, ShardInfo, checksum, save_record
from torchtitan_lr.data.indexed import IndexedWriter
from torchtitan_lr.errors import ConfigError, DataError


def shard(folder, name, documents, loss=False):
    tokens, lengths = np.concatenate(documents), np.array([len(d) for d in documents])
    kinds = [("", np.uint16, tokens)] + [(".loss", np.uint8, tokens % 2)] * loss
    for suffix, dtype, values in kinds:
        writer = IndexedWriter(folder / (name + suffix), dtype)
        writer.append(values, lengths)
        writer.finish()
        (folder / f"{name}{suffix}.lengths").unlink()
    prefix = str(folder / name)
    digest = checksum(prefix, "pairs" if loss else "text")
    return ShardInfo(prefix, len(tokens), len(lengths), digest)


def build(folder, loss=False, start=0):
    folder.mkdir()
    rows = np.arange(start, start + 60).reshape(12, 5)
    train = [shard(folder, f"train-0000{i}", rows[5 * i : 5 * i + 5], loss) for i in range(2)]
    held = [shard(folder, "held_out-00000", rows[10:], loss)]
    tokenizer = {"sha256": "abc", "bos": 0, "eos": 1}
    save_record(folder, "pairs" if loss else "text", tokenizer, [train, held], source="x")
    return Corpus.open(folder)


@pytest.mark.parametrize("loss", [False, True])
def test_a_prepared_folder(tmp_path, loss):
    found = build(tmp_path / "a", loss)
    assert (found.tokens(), found.tokens(held_out=True)) == (50, 10)
    assert (found.bos, found.eos, found.tokenizer) == (0, 1, "abc")
    assert found.kind == ("pairs" if loss else "text")
    assert found.shard(found.train[1]).tokens.tolist() == list(range(25, 50))
    assert found.shard(found.held_out[0]).ends.tolist() == [5, 10]
    if loss:
        assert found.shard(found.train[0], loss=True).tokens.tolist() == [n % 2 for n in range(25)]
    found.check()
    # The place does not matter to the identity, the content does.
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert Corpus.open(tmp_path / "b").identity == found.identity
    assert build(tmp_path / "c", loss, start=1).identity != found.identity


def test_a_shard_stays_in_its_folder(tmp_path):
    build(tmp_path / "a")
    path = tmp_path / "a" / "corpus.json"
    record = json.loads(path.read_text())
    record["train"][0]["name"] = "../../etc/passwd"
    path.write_text(json.dumps(record))
    assert Corpus.open(tmp_path / "a").train[0].prefix == str(tmp_path / "a" / "passwd")


def test_faults_are_found_before_a_run(tmp_path):
    corpus = build(tmp_path / "a")
    first, second = (tmp_path / "a" / f"train-0000{i}" for i in range(2))

    def refused(why):
        with pytest.raises(DataError, match=why) as found:
            Corpus.open(tmp_path / "a").check()
        assert "\n" not in str(found.value)

    content = first.with_suffix(".bin").read_bytes()
    first.with_suffix(".bin").write_bytes(content[:-1])
    refused("it was cut")
    first.with_suffix(".bin").write_bytes(b"\xff" + content[1:])  # a flipped token
    refused("were changed")
    first.with_suffix(".bin").write_bytes(content)
    corpus.check()
    index = second.with_suffix(".idx").read_bytes()
    shutil.copy(tmp_path / "a" / "held_out-00000.idx", second.with_suffix(".idx"))
    refused("index is of another .bin")
    second.with_suffix(".idx").write_bytes(index)
    os.unlink(second.with_suffix(".bin"))
    refused("a readable pair")


def test_a_large_corpus_is_checked_in_part(tmp_path, monkeypatch):
    corpus = build(tmp_path / "a")
    monkeypatch.setattr("torchtitan_lr.data.corpus.CHECKED_BYTES", 0)
    path = tmp_path / "a" / "train-00000.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    corpus.check()
    with pytest.raises(DataError, match="were changed"):
        corpus.check_shard(corpus.train[0])


def test_a_folder_of_another_writer(tmp_path):
    shard(tmp_path, "b", [np.arange(4)])
    shard(tmp_path, "a", [np.arange(3), np.arange(2)])
    found = Corpus.open(tmp_path)
    assert [info.name for info in found.train] == ["a", "b"]
    assert (found.tokens(), found.held_out, found.kind) == (9, [], "text")
    found.check()


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(ConfigError, match=r"a folder with corpus\.json"):
        Corpus.open(tmp_path)
    for text in ("{", "[]", '{"format": "other"}'):
        (tmp_path / "corpus.json").write_text(text)
        with pytest.raises(DataError, match="a record of format"):
            Corpus.open(tmp_path)
