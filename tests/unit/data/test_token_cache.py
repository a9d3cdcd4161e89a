# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Cached tokens are those of the text: whole, fresh and of the same tokenizer, or not used."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchtitan_lr.data import local_corpus, stripes, token_cache
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.data.token_cache import TokenCache
from torchtitan_lr.titan.base import HuggingFaceTokenizer, JobConfig

ROWS, SEQ, STEPS = 4, 32, 60


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer("torchtitan_lr/data/assets/bpe4k")


@pytest.fixture
def corpus(tmp_path):
    """A file of each kind of text, read about twice in `STEPS` steps."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": f"record {i} " + "word " * (i % 19)}) for i in range(120)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.txt").write_text("".join(f"line {i} {i * i}\n" for i in range(300)))
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """Counts the documents that the loaders encode."""
    count = SimpleNamespace(documents=0)
    encode = stripes.encode_documents

    def counted(tokenizer, texts):
        count.documents += len(texts)
        return encode(tokenizer, texts)

    monkeypatch.setattr(stripes, "encode_documents", counted)
    return count


def build(corpus, tokenizer, cache="token_cache", bad_records=0):
    job = JobConfig()
    job.job.dump_folder = str(corpus.parent / "dump")
    job.training.dataset, job.training.dataset_path = "local", str(corpus)
    job.training.seq_len, job.training.local_batch_size = SEQ, ROWS
    job.training.token_cache, job.training.max_bad_records = cache, bad_records
    return build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job)


def batches(corpus, tokenizer, **options):
    """The inputs of `STEPS` steps, read by a new loader."""
    loader = build(corpus, tokenizer, **options)
    found = torch.stack([inputs["input"] for inputs, _ in islice(loader, STEPS)])
    loader.close()
    return found


def entries(corpus):
    return sorted((corpus.parent / "dump").rglob("*.tokens"))


def test_batches_are_the_same_and_nothing_is_encoded_twice(corpus, tokenizer, encoded):
    expected = batches(corpus, tokenizer, cache="")
    without = encoded.documents
    assert not entries(corpus)
    assert torch.equal(batches(corpus, tokenizer), expected)
    # Even the first run has met some blocks twice.
    assert without < encoded.documents < 2 * without
    encoded.documents = 0
    assert torch.equal(batches(corpus, tokenizer), expected)
    assert encoded.documents == 0
    assert not list((corpus.parent / "dump").rglob("*.tmp"))


def test_a_position_is_the_same_with_and_without_cache(corpus, tokenizer):
    def resumed(state, cache):
        loader = build(corpus, tokenizer, cache=cache)
        loader.load_state_dict(state)
        return torch.stack([inputs["input"] for inputs, _ in islice(loader, 20)])

    batches(corpus, tokenizer)
    states = []
    for cache in ("token_cache", ""):
        loader = build(corpus, tokenizer, cache=cache)
        for _ in islice(loader, 17):
            pass
        states.append(loader.state_dict())
    assert states[0] == states[1]
    assert torch.equal(resumed(states[0], "token_cache"), resumed(states[0], ""))


@pytest.mark.parametrize("change", ["text", "tokenizer", "held out"])
def test_stale_entries_are_not_used(corpus, tokenizer, monkeypatch, change):
    before = batches(corpus, tokenizer)
    if change == "text":  # of the same size, so with the same fingerprint
        path = corpus / "b.txt"
        path.write_text(path.read_text().replace("line", "LINE"))
    elif change == "tokenizer":
        tokenizer = HuggingFaceTokenizer("torchtitan_lr/data/assets/bpe4k")
        tokenizer.tokenizer.add_tokens(["word word"])
    else:
        monkeypatch.setattr(local_corpus, "USUAL_LIMIT", 1 << 63)
        monkeypatch.setattr(local_corpus, "SMALL_BYTES", 0)
    expected = batches(corpus, tokenizer, cache="")
    assert not torch.equal(expected, before)
    assert torch.equal(batches(corpus, tokenizer), expected)
    assert torch.equal(batches(corpus, tokenizer), expected)


def flip(data):
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


DAMAGE = {"flipped": flip, "cut": lambda x: x[: len(x) // 2], "empty": lambda x: b""}
DAMAGE["grown"] = lambda x: x + x


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_written_again(corpus, tokenizer, encoded, damage):
    expected = batches(corpus, tokenizer)
    for path in entries(corpus):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    encoded.documents = 0
    assert torch.equal(batches(corpus, tokenizer), expected)
    assert encoded.documents
    encoded.documents = 0
    assert torch.equal(batches(corpus, tokenizer), expected)
    assert encoded.documents == 0


def test_a_flipped_bit_would_be_read_without_the_checksum(corpus, tokenizer, monkeypatch):
    """Negative control of the test above."""
    expected = batches(corpus, tokenizer)
    monkeypatch.setattr(token_cache.zlib, "crc32", lambda data: 0)
    for path in entries(corpus):
        data = bytearray(flip(path.read_bytes()))
        data[8:12] = bytes(4)
        path.write_bytes(data)
    assert not torch.equal(batches(corpus, tokenizer), expected)


def test_a_block_with_an_unreadable_record_is_read_every_time(corpus, tokenizer, monkeypatch):
    monkeypatch.setattr(local_corpus, "SMALL_BYTES", 0)
    path = corpus / "a.jsonl"
    path.write_text(path.read_text().replace("record 7 word", 'record 7" word', 1))
    for _ in range(2):
        loader = build(corpus, tokenizer, bad_records=1)
        for _ in islice(loader, STEPS):
            pass
        assert loader.bad_records == {f"{path}:8"}


def test_readers_see_whole_entries_while_others_write(tmp_path):
    documents = [np.full(5000, 7), np.arange(5000)]
    found = []

    def use(number):
        cache = TokenCache(tmp_path, "corpus", "tokenizer")
        for _ in range(20):
            cache.write(0, "stamp", documents)
            found.append(cache.read(0, "stamp"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert len(found) == 80 and None not in found
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0.tokens"]


@pytest.mark.parametrize("fault", ["file", "full"])
def test_a_cache_that_cannot_be_written_is_no_error(corpus, tokenizer, monkeypatch, caplog, fault):
    expected = batches(corpus, tokenizer, cache="")
    if fault == "file":
        (corpus.parent / "dump").write_text("in the way")
    else:
        monkeypatch.setattr(
            token_cache.shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=9)
        )
    assert torch.equal(batches(corpus, tokenizer), expected)
    assert not list(corpus.parent.rglob("*.tokens"))
    told = [record for record in caplog.records if "is not written any more" in record.message]
    assert len(told) == 1
