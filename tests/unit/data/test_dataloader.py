# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The loader: the same global batches for any split, and exact resume from one integer."""

from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.corpora import write_corpus
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.data.dataloader import TokenDataLoader, TrainingRows
from torchtitan_lr.data.rows import DOCUMENTS, Rows
from torchtitan_lr.errors import ConfigError, DataError

S, B = 6, 24
"""Tokens of an input, rows of a global batch."""

WINDOWS = 50


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two of text, of 50 and 20 windows, whose every token is another; and one of pairs."""
    folder, size = tmp_path_factory.mktemp("corpora"), S + 1
    text = [list(range(start, start + 35)) for start in range(0, WINDOWS * size, 35)]
    more = [list(range(1000 + start, 1010 + start)) for start in range(0, 20 * size, 10)]
    pairs = [list(range(2000 + start, 2003 + start)) for start in range(0, 60, 3)]
    return (
        write_corpus(folder / "text", [text[:4], text[4:]]),
        write_corpus(folder / "more", [more]),
        write_corpus(folder / "pairs", [pairs], masks=[[[0, 1, 1]] * len(pairs)]),
    )


def rows_of(corpora, which=1, seed=0, seq_len=S, **options):
    named = zip(corpora, ("text", "more", "pairs")[:which], (5, 3, 1), strict=False)
    parts = [Rows(corpus, seq_len, name=name, weight=weight) for corpus, name, weight in named]
    return TrainingRows(parts, seed, **options)


def build(rows, ranks=1, local=B, total=B, **options):
    sizes = {"local_batch_size": local, "global_batch_size": total, "dp_world_size": ranks}
    return [TokenDataLoader(rows, **sizes, dp_rank=rank, **options) for rank in range(ranks)]


def steps(loaders, n):
    """Take n global batches: (n, B, s) of inputs, labels and, with pairs, documents."""
    found = []
    readers = [iter(loader) for loader in loaders]
    for _ in range(n * loaders[0].microbatches):
        for reader in readers:
            inputs, labels = next(reader)
            values = [inputs["input"], labels, inputs.get(DOCUMENTS, torch.zeros_like(labels))]
            assert all(value.dtype == torch.int64 for value in values)
            found.append(torch.stack(values, 1))
    for loader in loaders:
        loader.rows += n * loader.microbatches * loader.stride
    return torch.cat(found).unflatten(0, (n, -1))


SPLITS = [(1, 24), (1, 4), (2, 6), (3, 8), (4, 2), (8, 3), (8, 1)]
"""Ranks and rows of a micro-batch."""


@pytest.mark.parametrize("which", [1, 3], ids=["one", "mixture"])
def test_global_batches_do_not_depend_on_the_split(corpora, which):
    rows = rows_of(corpora, which)
    expected = steps(build(rows), 7)
    for ranks, local in SPLITS[1:]:
        assert torch.equal(steps(build(rows, ranks, local), 7), expected)
    # The rows, and not the batches, are in the order: twice as large ones are two of these.
    assert torch.equal(steps(build(rows, 2, 6, 2 * B), 3).flatten(0, 1), expected[:6].flatten(0, 1))
    assert not torch.equal(steps(build(rows_of(corpora, which, seed=1)), 7), expected)


def test_an_epoch_has_each_window_once_and_the_next_ones_another_order(corpora):
    found = steps(build(rows_of(corpora), 2, 3), 3 * WINDOWS // B + 1).flatten(0, 1)
    first = found[: 3 * WINDOWS, 0, 0].unflatten(0, (3, WINDOWS)).tolist()
    expected = list(range(0, WINDOWS * (S + 1), S + 1))
    assert [sorted(epoch) for epoch in first] == [expected] * 3
    assert len({tuple(epoch) for epoch in [*first, expected]}) == 4
    assert torch.equal(found[:, 1], found[:, 0] + 1)
    in_order = steps(build(rows_of(corpora, seed=None), 2, 3), 4)
    assert in_order.flatten(0, 1)[: 2 * WINDOWS - 4, 0, 0].tolist() == (expected * 2)[:-4]


def test_the_rows_of_a_mixture_are_those_of_its_parts_in_their_shares(corpora):
    rows = rows_of(corpora, 3)
    loader = build(rows)[0]
    found = steps([loader], 9).flatten(0, 1)
    part_of = torch.bucketize(found[:, 0, 0], torch.tensor([999, 1999]))
    for n in range(1, len(found) + 1):
        counts = Counter(part_of[:n].tolist())
        assert all(abs(counts[part] - n * w / 9) < 1 for part, w in enumerate((5, 3, 1)))
    names = [f"data_share/{name}" for name in ("text", "more", "pairs")]
    shares = torch.bincount(part_of) / torch.tensor(len(found), dtype=torch.float64)
    assert loader.shares() == dict(zip(names, shares.tolist(), strict=True))
    # Rows of text are one document each, those of pairs three (with the padding).
    documents = [len(set(row.tolist())) for row in found[:, 2]]
    assert set(zip(part_of.tolist(), documents, strict=True)) == {(0, 1), (1, 1), (2, 2)}
    assert build(rows_of(corpora))[0].shares() == {}


@pytest.mark.parametrize("which", [1, 3], ids=["one", "mixture"])
@pytest.mark.parametrize("done", range(6))
def test_resume_is_exact_after_every_step_at_any_split(corpora, which, done, tmp_path):
    rows = rows_of(corpora, which)
    saved = build(rows, 4, 2)
    if done:
        steps(saved, done)
    assert all(loader.state_dict()["rows"] == done * B for loader in saved)
    dcp.save({"dataloader": saved[3]}, checkpoint_id=tmp_path, no_dist=True)
    expected = steps(saved, 4)
    for ranks, local in SPLITS:
        loaders = build(rows, ranks, local)
        for loader in loaders:
            assert loader.check_checkpoint(str(tmp_path), read_metadata(tmp_path))
            dcp.load({"dataloader": loader}, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(steps(loaders, 4), expected)


def test_the_reader_goes_to_the_position_with_its_loader(corpora):
    """Between micro-batches too, whatever was read ahead."""
    loader = build(rows_of(corpora), 1, 2)[0]
    reader = iter(loader)
    labels = [next(reader)[1].tolist() for _ in range(8)]
    assert loader.state_dict()["rows"] == 0
    loader.seek(10)
    assert loader.state_dict()["rows"] == 10
    assert [next(reader)[1].tolist() for _ in range(3)] == labels[5:]


def test_worker_processes_read_the_same_and_their_reading_ahead_is_no_position(corpora):
    rows = rows_of(corpora, 3)
    workers = build(rows, 2, 3, num_workers=2, prefetch_factor=3)
    expected = steps(build(rows, 2, 3), 4)
    assert torch.equal(steps(workers, 2), expected[:2])
    assert workers[0].state_dict()["rows"] == 2 * B
    for loader in workers:
        loader.seek(B)
    assert torch.equal(steps(workers, 2), expected[1:3])
    for loader in workers:
        loader.close()


OLD = {"sample_index": 48, "global_batch_size": 24, "corpus": "local blocks=1", "lane_0": "{}"}

CHANGED = {
    "corpus": ({"which": 3}, "training.mixture: got "),
    "seed": ({"seed": 4}, "training.shuffle_seed: got '4', expected 0 as in"),
    "length": ({"seq_len": 5}, "training.seq_len: got '5', expected 6 as in"),
    "old loader": ({}, "checkpoint: got "),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_position_in_other_data_is_refused_or_starts_them_anew(corpora, change, tmp_path):
    options, line = CHANGED[change]
    loader = build(rows_of(corpora))[0]
    steps([loader], 2)
    stored = {"dataloader": OLD if change == "old loader" else loader}
    dcp.save(stored, checkpoint_id=tmp_path, no_dist=True)
    found = (str(tmp_path), read_metadata(tmp_path))
    with pytest.raises(ConfigError) as error:
        rows_of(corpora, **options).check_checkpoint(*found)
    text = str(error.value)
    assert text.startswith(line) and "\n" not in text, text
    assert "training.allow_changed_corpus = true starts the data anew" in text
    assert ("training.hf_tokens" in text) == (change == "corpus")
    assert not rows_of(corpora, **options, allow_changed=True).check_checkpoint(*found)


def test_a_shard_that_vanishes_is_an_error_of_its_batch(tmp_path):
    rows = rows_of([write_corpus(tmp_path, [[list(range(70))], [list(range(70))]])], seed=None)
    reader = iter(build(rows, 1, 5, 5)[0])
    (tmp_path / "train-00001.bin").unlink()
    assert next(reader)[0]["input"][0, 0] == 0 and next(reader)
    with pytest.raises(DataError, match=r"train-00001.idx"):
        next(reader)
