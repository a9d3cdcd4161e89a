# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr prepare``: files, a dataset of the Hub, and what is refused."""

from tests.commands import Command
from tests.support.corpora import write_jsonl
from torchtitan_lr.data.corpus import Corpus

command = Command("prepare").ask

SHIPPED = "torchtitan_lr/data/assets/bpe4k"
TEXTS = [f"Document {i} of {i * i} words.\n" for i in range(400)]


def test_files_are_prepared_and_verified(tmp_path, capsys):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", TEXTS) for name in "ab"]
    out = tmp_path / "out"
    status, said, _ = command(capsys, *paths, "--tokenizer", SHIPPED, "--out", out)
    corpus = Corpus.open(out)
    assert len(corpus.record["sources"]) == 1
    train, held_out = corpus.tokens(), corpus.tokens(held_out=True)
    last = f"{train:,} tokens to train on, {held_out:,} held out -> {out}\n"
    held = sum(info.documents for info in corpus.held_out)
    documents = held + sum(info.documents for info in corpus.train)
    assert documents == 2 * len(TEXTS)
    first, rest = said.split("\n", 1)
    assert first.startswith(f"out: {held} of {documents} documents are held out for validation (")
    assert (status, rest) == (0, last)
    assert command(capsys, "--out", out, "--verify")[:2] == (0, said)
    status, _, err = command(capsys, paths[0], "--tokenizer", SHIPPED, "--out", out)
    assert status == 2 and "another folder: it was prepared from other sources" in err
    with (out / "train-00000.bin").open("r+b") as file:
        file.write(b"\xff")
    status, _, err = command(capsys, "--out", out, "--verify")
    assert status == 2 and "were changed" in err and err.startswith("error: --out: ")
    assert f"delete {out}, and `torchtitan-lr prepare ... --out {out}`" in err
