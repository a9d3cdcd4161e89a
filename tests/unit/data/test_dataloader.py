# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The order of rows; the same global batches for any split; exact resume from one integer."""

import multiprocessing
import os
import tempfile
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpora import write_corpus
from tests.support.processes import in_child
from torchtitan_lr.data import dataloader
from torchtitan_lr.data.corpus import DOCUMENTS, Rows
from torchtitan_lr.data.dataloader import (
    MOST_SLOTS,
    Shares,
    TokenDataLoader,
    TrainingRows,
    shuffled,
)

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
        loader.position += n * loader.microbatches * loader.stride
    return torch.cat(found).unflatten(0, (n, -1))


SPLITS = [(1, 24), (1, 4), (2, 6), (3, 8), (4, 2), (8, 3), (8, 1)]
"""Ranks and rows of a micro-batch."""


@pytest.mark.parametrize("seed", [0, None])
def test_an_epoch_has_each_window_once_and_the_next_ones_another_order(corpora, seed):
    found = steps(build(rows_of(corpora, seed=seed), 2, 3), 3 * WINDOWS // B + 1).flatten(0, 1)
    first = found[: 3 * WINDOWS, 0, 0].unflatten(0, (3, WINDOWS)).tolist()
    expected = list(range(0, WINDOWS * (S + 1), S + 1))
    assert [sorted(epoch) for epoch in first] == [expected] * 3
    assert len({tuple(epoch) for epoch in [*first, expected]}) == (1 if seed is None else 4)
    assert torch.equal(found[:, 1], found[:, 0] + 1)


def test_the_rows_of_a_mixture_are_those_of_its_parts_in_their_shares(corpora):
    loader = build(rows_of(corpora, 3))[0]
    found = steps([loader], 9).flatten(0, 1)
    part_of = torch.bucketize(found[:, 0, 0], torch.tensor([999, 1999]))
    assert torch.bincount(part_of).tolist() == [len(found) * share // 9 for share in (5, 3, 1)]
    # Rows of text are one document each, those of pairs three (with the padding).
    documents = [len(set(row.tolist())) for row in found[:, 2]]
    assert set(zip(part_of.tolist(), documents, strict=True)) == {(0, 1), (1, 1), (2, 2)}


@pytest.mark.parametrize("which", [1, 3], ids=["one", "mixture"])
@pytest.mark.parametrize("done", range(6))
def test_batches_and_a_resume_do_not_depend_on_the_split(corpora, which, done, tmp_path):
    rows = rows_of(corpora, which)
    saved, whole = build(rows, 4, 2), steps(build(rows), done + 4)
    assert done == 0 or torch.equal(steps(saved, done), whole[:done])
    assert all(loader.state_dict()["rows"] == done * B for loader in saved)
    dcp.save({"dataloader": saved[3]}, checkpoint_id=tmp_path, no_dist=True)
    # The rows, and not the batches, are in the order: one of twice the size is two of these.
    for ranks, local, total in [*((*split, B) for split in SPLITS), (2, 6, 2 * B)]:
        loaders = build(rows, ranks, local, total)
        for loader in loaders:
            dcp.load({"dataloader": loader}, checkpoint_id=tmp_path, no_dist=True)
        found = steps(loaders, 4 * B // total)
        assert torch.equal(found.flatten(0, 1), whole[done:].flatten(0, 1))
    assert not torch.equal(steps(build(rows_of(corpora, which, seed=1)), done + 4), whole)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "prefetch_factor": 3}])
def test_what_is_read_ahead_is_no_position(corpora, options):
    """The reader goes to a position with its loader, between micro-batches too."""
    rows = rows_of(corpora, 3)
    expected = steps(build(rows, 1, 4), 3).flatten(0, 1).unflatten(0, (-1, 4))
    loader = build(rows, 1, 4, **options)[0]
    reader = iter(loader)
    for start in (0, 2):  # the micro-batch
        loader.seek(4 * start)
        for micro_batch in expected[start : start + 8]:
            inputs, labels = next(reader)
            assert torch.equal(inputs["input"], micro_batch[:, 0])
            assert torch.equal(labels, micro_batch[:, 1])
        assert loader.state_dict()["rows"] == 4 * start
    loader.close()


@pytest.mark.timeout(60)
def test_a_worker_that_cannot_send_ends_the_wait(corpora, tmp_path, monkeypatch, capfd):
    """Its sockets are in TMPDIR, whose path is too long for one."""
    (place := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    loader = build(rows_of(corpora), 1, 4, num_workers=1)[0]
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iter(loader))
    loader.close()
    assert "error: worker 0 cannot send: AF_UNIX path too long" in capfd.readouterr().err


class StuckRows(TrainingRows):
    """Reads that never return: of a pipe, in the place of a storage that hangs."""

    def __getitems__(self, rows):
        with open(self.pipe):
            return super().__getitems__(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_read_that_never_returns_ends_with_the_run(corpora, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(dataloader, "LAST_READ_SECONDS", 0.1)
    rows = StuckRows([Rows(corpora[0], S)])
    rows.pipe = tmp_path / "pipe"
    os.mkfifo(rows.pipe)

    def run():
        loader = build(rows, 1, 4, num_workers=workers)[0]
        loader.stopping = iter([False, True]).__next__
        with pytest.raises(RuntimeError, match="not read yet when the run was stopped"):
            next(iter(loader))
        loader.close()
        os._exit(0)  # as a rank

    assert in_child(run) == 0  # and no worker lives


SEEDS = st.integers(0, 2**63)


@given(size=st.integers(1, 10**12), first=st.integers(0, 10**13), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_the_rows_around_it(size, first, seed):
    rows = np.arange(first, first + 40)
    together = shuffled(rows, size, seed, 1)
    alone = [int(shuffled(rows[i : i + 1], size, seed, 1)[0]) for i in range(40)]
    assert together.tolist() == alone
    assert together.min() >= 0 and together.max() < size
    few = size % 3000 + 1
    epochs = shuffled(np.arange(3 * few), few, seed).reshape(3, few)
    assert np.array_equal(np.sort(epochs), [np.arange(few)] * 3)  # each window once


def test_the_order_looks_random():
    size = 1 << 15
    orders = [shuffled(np.arange(size), size, seed) for seed in (0, 1)]
    places = np.arange(size)
    # Independent uniform places: a correlation is below 4 / sqrt(32768) = 0.022 in all but 1e-4.
    pairs = [(orders[0], orders[1]), (orders[0], places), (orders[0][:-1], orders[0][1:])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.022 for a, b in pairs)
    # Fixed points of a random permutation: Poisson with mean 1.
    assert (orders[0] == places).sum() < 8
    # Each quarter of the rows has all quarters of the text alike: 2048 +- 5 * 39.
    table = np.histogram2d(places // (size // 4), orders[0] // (size // 4), bins=4)[0]
    assert abs(table - size / 16).max() < 5 * 39


WEIGHTS = st.lists(st.integers(1, 60) | st.sampled_from([0.1, 0.25, 1.75]), min_size=1, max_size=6)


@given(WEIGHTS)
@settings(max_examples=25, deadline=None)
def test_shares_are_exact_at_every_point(weights):
    shares = Shares(weights)
    rows = np.arange(min(2 * len(shares.slots) + 5, 1000))
    parts, numbers = shares.choose(rows)
    exact = [Fraction(str(weight)) for weight in weights]
    seen = [0] * len(weights)
    for row, part, number in zip(rows.tolist(), parts.tolist(), numbers.tolist(), strict=True):
        assert number == seen[part]  # each part's rows in their order, none twice
        seen[part] += 1
        for count, weight in zip(seen, exact, strict=True):
            assert abs(count - (row + 1) * weight / sum(exact)) < 1


def test_shares_that_need_a_long_period_are_rounded():
    weights = [0.123457, 1 / 3, 2e-7, 2]
    shares = Shares(weights)
    assert len(shares.slots) == MOST_SLOTS and shares.counts.min() == 1
    wanted = np.array(weights) / sum(weights)
    assert abs(shares.counts / MOST_SLOTS - wanted).max() <= 2 / MOST_SLOTS
    parts, _ = shares.choose(np.arange(10**15, 10**15 + MOST_SLOTS))
    assert np.bincount(parts).tolist() == shares.counts.tolist()
