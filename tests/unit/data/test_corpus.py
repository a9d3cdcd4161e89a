# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The record of a prepared folder, and the faults that it finds."""

import numpy as np
import pytest

from tests.support.corpora import write_corpus, write_shard
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.errors import ConfigError, DataError


def build(folder, loss=False, start=0):
    rows = np.arange(start, start + 60).reshape(12, 5).tolist()
    shards = [rows[:5], rows[5:10], rows[10:]]
    masks = [[[token % 2 for token in row] for row in shard] for shard in shards]
    return write_corpus(folder, shards[:2], shards[2:], masks if loss else None)


@pytest.mark.parametrize("loss", [False, True])
def test_a_prepared_folder(tmp_path, loss):
    found = build(tmp_path / "a", loss)
    assert (found.tokens(), found.tokens(held_out=True)) == (50, 10)
    assert found.kind == ("pairs" if loss else "text")
    assert found.shard(found.train[1]).read().tolist() == list(range(25, 50))
    assert found.shard(found.held_out[0]).ends.tolist() == [5, 10]
    if loss:
        assert found.shard(found.train[0], loss=True).read().tolist() == [n % 2 for n in range(25)]
    found.check()
    # The place does not matter to the identity, the content does.
    (tmp_path / "a").rename(tmp_path / "b")
    assert Corpus.open(tmp_path / "b").identity == found.identity
    assert build(tmp_path / "c", loss, start=1).identity != found.identity


FAULTS = {
    "cut": ("train-00000.bin", lambda content, _: content[:-1], "it was cut"),
    "flipped": ("train-00000.bin", lambda content, _: b"\xff" + content[1:], "were changed"),
    "foreign": ("train-00001.idx", lambda _, folder: read_index(folder), "is of another .bin"),
    "missing": ("train-00001.bin", lambda *_: None, "a readable pair"),
    "counts": (
        "corpus.json",
        lambda content, _: content.replace(b's": 25', b's": 24'),
        "as recorded",
    ),
}


def read_index(folder):
    return (folder / "held_out-00000.idx").read_bytes()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_before_a_run(tmp_path, monkeypatch, name):
    corpus, (file, change, why) = build(tmp_path), FAULTS[name]
    corpus.check()
    content = change((tmp_path / file).read_bytes(), tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=why) as found:
        Corpus.open(tmp_path).check()
    assert "\n" not in str(found.value)
    if name == "flipped":  # of a large corpus only `prepare --verify` finds it
        monkeypatch.setattr("torchtitan_lr.data.corpus.CHECKED_BYTES", 0)
        corpus.check()
        with pytest.raises(DataError, match=why):
            corpus.check_shard(corpus.train[0])


def test_a_folder_of_another_writer(tmp_path):
    write_shard(tmp_path / "b", np.uint16, [[1] * 4])
    write_shard(tmp_path / "a", np.uint16, [[1] * 3, [2] * 2])
    found = Corpus.open(tmp_path)
    assert [info.name for info in found.train] == ["a", "b"]
    assert (found.tokens(), found.held_out, found.kind) == (9, [], "text")
    found.check()


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(ConfigError, match=r"a folder with corpus\.json"):
        Corpus.open(tmp_path)
    build(tmp_path)
    path = tmp_path / "corpus.json"
    path.write_text(path.read_text().replace("train-00000", "../../etc/passwd"))
    corpus = Corpus.open(tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path}/passwd.idx"):  # it stays in its folder
        corpus.shard(corpus.train[0])
    for text in ("{", "[]", '{"format": "other"}'):
        path.write_text(text)
        with pytest.raises(DataError, match="a record of format"):
            Corpus.open(tmp_path)
