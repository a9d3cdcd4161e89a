# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a thread reads ahead changes when work is done, and nothing else."""

import gc
import json
import threading
import time
from itertools import count, islice
from statistics import median

import pytest
import torch

from torchtitan_lr.data import local_corpus
from torchtitan_lr.data.dataloader import StripeDataLoader
from torchtitan_lr.data.local_corpus import LocalCorpus
from torchtitan_lr.data.stripes import stripe_block
from torchtitan_lr.errors import DataError
from torchtitan_lr.titan.base import HuggingFaceTokenizer

ROWS, SEQ = 4, 16
BROKEN = (3, 14, 40, 41, 77)
STEPS_AHEAD = (0, 1, 5)


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer("torchtitan_lr/data/assets/bpe4k")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(local_corpus, "SMALL_BYTES", 0)
    lines = [json.dumps({"text": f"line {i} " + "word " * (i * 7 % 23)}) for i in range(100)]
    for i in BROKEN:
        lines[i] = lines[i][:-1]
    (tmp_path / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    return str(tmp_path / "a.jsonl")


def build(path, tokenizer, ahead, bad_records=9, seq=SEQ, **options):
    corpus = LocalCorpus(path, "training.dataset_path", ROWS, "all", bad_records)
    sizes = {"local_batch_size": 2, "global_batch_size": ROWS, "dp_world_size": 1, "dp_rank": 0}
    return StripeDataLoader(corpus, tokenizer, seq_len=seq, steps_ahead=ahead, **sizes, **options)


def by_hand(path, tokenizer):
    """Yield the rows of each micro-batch, and the unreadable records met up to it.

    Every stripe reads its next document when it lacks tokens, and nothing before.
    """
    corpus = LocalCorpus(path, "training.dataset_path", ROWS)
    met = set()

    def tokens(stripe):
        for k in count():
            for document in corpus.documents(stripe_block(stripe, ROWS, corpus.num_blocks, k)):
                if isinstance(document, DataError):
                    met.add(document.got)
                else:
                    yield from tokenizer.encode(document, add_bos=True, add_eos=True)

    streams = [tokens(stripe) for stripe in range(ROWS)]
    for m in count():
        rows = [list(islice(streams[m % 2 * 2 + i], SEQ + 1)) for i in range(2)]
        yield torch.tensor(rows), set(met)


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_batches_and_skipped_records_come_when_they_are_used(path, tokenizer, ahead):
    loader = build(path, tokenizer, ahead)
    seen = []
    both = zip(loader, by_hand(path, tokenizer), strict=False)
    for (inputs, labels), (rows, met) in islice(both, 40):
        assert torch.equal(inputs["input"], rows[:, :-1])
        assert torch.equal(labels, rows[:, 1:])
        assert loader.bad_records == met
        seen.append(len(met))
    assert seen[0] < seen[10] < seen[-1] == len(BROKEN)


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_an_error_is_raised_with_the_batch_that_needs_the_record(path, tokenizer, ahead):
    allowed = 2
    good = 0
    for _, met in by_hand(path, tokenizer):
        if len(met) > allowed:
            break
        good += 1
    loader = build(path, tokenizer, ahead, bad_records=allowed)
    assert 4 < len(list(islice(loader, good))) == good
    before = loader.state_dict()
    loader.mark()
    for _ in range(2):  # and again, for whoever reads on
        with pytest.raises(DataError, match="= 2 are skipped already"):
            next(iter(loader))
    loader.return_to_mark()
    assert loader.state_dict()["sample_index"] == before["sample_index"] == good * 2


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_the_position_is_that_of_what_was_yielded(path, tokenizer, ahead):
    expected = [labels for _, labels in islice(build(path, tokenizer, 0), 30)]
    loader = build(path, tokenizer, ahead)
    for done in range(12):
        if ahead:
            wait_until_full(loader, ahead * 2)
        resumed = build(path, tokenizer, ahead)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.bad_records == loader.bad_records
        rest = [labels for _, labels in islice(resumed, 30 - done)]
        assert all(map(torch.equal, rest, expected[done:]))
        if ahead and done:
            # Negative control: the reader itself is elsewhere.
            assert loader._reader.positions() != loader._positions
        next(iter(loader))
    # A loader that is used can be moved as well.
    state = resumed.state_dict()
    ahead_of_it = [labels for _, labels in islice(resumed, 5)]
    resumed.load_state_dict(state)
    assert all(map(torch.equal, [y for _, y in islice(resumed, 5)], ahead_of_it))


def wait_until_full(loader, items):
    if loader._batches is None:
        return
    end = time.monotonic() + 20
    while len(loader._batches._shelf._items) < items and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("way", ["close", "forget"])
def test_the_thread_ends(path, tokenizer, way):
    loader = build(path, tokenizer, 2)
    next(iter(loader))
    thread = loader._batches._thread
    assert thread.is_alive() and thread.daemon
    if way == "close":
        loader.close()
    else:
        del loader
        gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert thread not in threading.enumerate()


STEP = 0.16


def waits(loader, seconds, steps=7):
    """Seconds of waiting for each step's data but the first's; each step takes `seconds`."""
    found = []
    batches = iter(loader)
    for _ in range(steps):
        start = time.perf_counter()
        next(batches), next(batches)
        found.append(time.perf_counter() - start)
        time.sleep(seconds)
    loader.close()
    return found[1:]


def test_a_step_does_not_wait_for_data(tmp_path, tokenizer):
    """Steps of 160 ms: the loader that works ahead is waited for less than 1 ms."""
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 40)
    for attempt in range(3):  # another program may take the core
        idle = waits(build(str(tmp_path), tokenizer, 2, seq=1024), STEP)
        busy = waits(build(str(tmp_path), tokenizer, 0, seq=1024), 0)
        print(f"attempt {attempt}: {median(idle)} s of waiting, {median(busy)} s without a thread")
        if median(idle) < 1e-3 and sum(idle) < sum(busy) / 3:
            return
    pytest.fail("three attempts waited for data")
