# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr prepare``: files, a dataset of the Hub, and what is refused."""

import json
import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tokenizers import Tokenizer

from tests.commands import ROOT, Command
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


COMMIT = "0123456789" * 4


class Hub(SimpleHTTPRequestHandler):
    """Serves a dataset. At which commit its branch ``main`` is it says only once."""

    def end_headers(self):
        if "/revision/main" in self.path:
            Path(self.translate_path(self.path)).unlink(missing_ok=True)
        self.send_header("ETag", "content")
        self.send_header("X-Error-Code", "EntryNotFound")  # of what is not there
        super().end_headers()


@pytest.mark.nightly
def test_the_record_has_the_commit_of_the_hub_that_was_read(tmp_path):
    web, api = tmp_path / "web", "api/datasets/owner/name"
    text = write_jsonl(tmp_path / "a.jsonl", TEXTS).read_text()
    about = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": "a.jsonl"}]}
    tree = [{"type": "file", "path": "a.jsonl", "size": len(text), "oid": "0"}]
    for path, content in {
        f"datasets/owner/name/resolve/{COMMIT}/a.jsonl": text,
        f"{api}/revision/main": json.dumps(about),
        f"{api}/revision/{COMMIT}": json.dumps(about),
        f"{api}/tree/{COMMIT}": json.dumps(tree),
    }.items():
        (web / path).parent.mkdir(parents=True, exist_ok=True)
        (web / path).write_text(content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=web))
    Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    started = [sys.executable, "-m", "torchtitan_lr", "prepare", "hf:owner/name@main"]
    started += [f"--tokenizer={SHIPPED}", f"--out={tmp_path}/out"]
    subprocess.run(started, cwd=ROOT, env=os.environ | own, check=True)
    server.shutdown()
    corpus = check(tmp_path / "out", TEXTS)
    assert [source["commit"] for source in corpus.record["sources"]] == [COMMIT]
