# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr prepare``: files, a dataset of the Hub, and what is refused."""

from tokenizers import Tokenizer

from tests.commands import Command
from tests.support.corpora import read_documents, write_jsonl
from torchtitan_lr.data.corpus import Corpus

command = Command("prepare").ask

SHIPPED = "torchtitan_lr/data/assets/bpe4k"
TEXTS = [f"Document {i} of {i * i} words.\n" for i in range(400)]


def check(out, texts):
    """Compare all documents of a folder with texts."""
    corpus = Corpus.open(out)
    found = read_documents(corpus) + read_documents(corpus, held_out=True)
    tokenizer = Tokenizer.from_file(f"{SHIPPED}/tokenizer.json")
    begin, end = map(tokenizer.token_to_id, ("<|begin_of_text|>", "<|end_of_text|>"))
    encoded = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    assert sorted(found) == sorted([begin, *ids, end] for ids in encoded)
    return corpus


def test_files_are_prepared_and_verified(tmp_path, capsys):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", TEXTS) for name in "ab"]
    out = tmp_path / "out"
    status, said, _ = command(capsys, *paths, "--tokenizer", SHIPPED, "--out", out)
    corpus = check(out, TEXTS * 2)
    assert len(corpus.record["sources"]) == 1
    train, held_out = corpus.tokens(), corpus.tokens(held_out=True)
    last = f"{train:,} tokens to train on, {held_out:,} held out -> {out}\n"
    held = sum(info.documents for info in corpus.held_out)
    documents = held + sum(info.documents for info in corpus.train)
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
