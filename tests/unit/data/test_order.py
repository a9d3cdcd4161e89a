# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The shuffled order: permutations, groups of windows, exact resume at any split, old positions."""

import json

import pytest
import torch

from tests.unit.data.test_dataloader import ROWS, SEQ, SPLITS, config, steps, union
from tests.unit.data.test_dataloader import text as text
from tests.unit.data.test_dataloader import tokenizer as tokenizer
from tests.unit.data.test_stripes import Bytes, corpus
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.data.order import Order, permutation
from torchtitan_lr.data.shuffle import ShuffledStripe
from torchtitan_lr.data.stripes import BlockStream, Stripe

pytestmark = pytest.mark.usefixtures("small_library")

WORD = 2**64


def reference_permutation(count, *key):
    """The same order from Python's integers, written out from SplitMix64."""

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
        return z ^ (z >> 31)

    seed = 0x9E3779B97F4A7C15
    for part in key:
        seed = mix(seed ^ mix((part + 0x9E3779B97F4A7C15) % WORD))
    return sorted(range(count), key=lambda i: mix((i * 0x9E3779B97F4A7C15 + seed) % WORD))


@pytest.mark.parametrize("key", [(0,), (0, 1), (7, 3, 2), (-1, 5), (2**63 - 1,)])
def test_permutations_are_those_of_python_integers(key):
    found = permutation(100, *key).tolist()
    assert found == reference_permutation(100, *key)
    assert sorted(found) == list(range(100))
    others = [permutation(100, *key[:-1], key[-1] + 1), permutation(100, *key, 0)]
    assert all(found != other.tolist() for other in others)


@pytest.mark.parametrize(("stripes", "blocks"), [(1, 1), (4, 6), (6, 4), (3, 7), (16, 4)])
def test_every_pass_reads_each_block_once(stripes, blocks):
    order = Order(3, 1)
    count = 5 * blocks * stripes
    read = [order.block(n % stripes, stripes, blocks, n // stripes) for n in range(count)]
    passes = [read[i : i + blocks] for i in range(0, count, blocks)]
    assert all(sorted(one) == list(range(blocks)) for one in passes)
    if blocks > 3:
        assert len({tuple(one) for one in passes}) > 1


def shuffled(stripe=1, seed=5, tokens=77, infinite=True, source=None):
    order = Order(seed, tokens)
    stream = BlockStream(source or corpus(), stripe, 4, infinite, order)
    return ShuffledStripe(stream, Bytes(), 6, order, stripe)


def test_a_group_is_the_plain_windows_permuted():
    order = Order(5, 77)  # 11 windows of 7 tokens
    plain = Stripe(BlockStream(corpus(), 1, 4, True, order), Bytes(), 6)
    stripe = shuffled()
    for group in range(5):
        windows = [plain.next_window() for _ in range(11)]
        found = [stripe.next_window() for _ in range(11)]
        assert found == [windows[i] for i in reference_permutation(11, 5, 1, group)]
        assert found != windows


def test_one_pass_has_each_window_once():
    stripe = shuffled(infinite=False)
    plain = Stripe(BlockStream(corpus(), 1, 4, False, Order(5, 77)), Bytes(), 6)
    found, windows = [], []
    while (window := stripe.next_window()) is not None:
        found.append(window)
    while (window := plain.next_window()) is not None:
        windows.append(window)
    assert sorted(found) == sorted(windows) and len(found) % 11


@pytest.mark.parametrize("stop", [0, 1, 10, 11, 12, 25])
def test_resume_is_exact_wherever_it_stops(stop):
    stripe = shuffled()
    for _ in range(stop):
        stripe.next_window()
    stored = json.dumps(stripe.state())
    expected = [stripe.next_window() for _ in range(50)]
    resumed = shuffled()
    resumed.next_window()  # it stood elsewhere
    resumed.load_state(json.loads(stored))
    assert json.dumps(resumed.state()) == stored
    assert [resumed.next_window() for _ in range(50)] == expected
    for other in ({"taken": (json.loads(stored)["taken"] + 1) % 11}, {"group": 9}):
        resumed.load_state(json.loads(stored) | other)
        assert [resumed.next_window() for _ in range(50)] != expected


def options(path=None, shuffle=True, local=ROWS, seed=0):
    job = config(local, path)
    job.training.shuffle, job.training.shuffle_tokens = shuffle, 10 * (SEQ + 1)
    job.training.shuffle_seed, job.debug.seed = None, seed
    return job


def build(tokenizer, dp, job):
    ranks = range(dp)
    return [
        build_dataloader(dp_world_size=dp, dp_rank=r, tokenizer=tokenizer, job_config=job)
        for r in ranks
    ]


def test_batches_do_not_depend_on_the_split(tokenizer, text):
    reference = steps(build(tokenizer, 1, options(text)), ROWS, 30)
    for dp, local in SPLITS:
        found = steps(build(tokenizer, dp, options(text, local=local)), local, 30)
        assert torch.equal(found, reference)
    assert not torch.equal(steps(build(tokenizer, 1, options(text, seed=1)), ROWS, 30), reference)
    assert not torch.equal(steps(build(tokenizer, 1, options(text, False)), ROWS, 30), reference)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [({}, {}), ({"shuffle": False}, {}), ({}, {"shuffle": False}), ({}, {"seed": 1})],
    ids=["the same", "from before the shuffle", "turned off", "another seed"],
)
def test_a_checkpoint_continues_in_its_own_order(tokenizer, text, saved, resumed):
    loaders = build(tokenizer, 4, options(text, **saved, local=2))
    steps(loaders, 2, 13)
    state = union(loaders)
    has_order = ["order" in json.loads(state[f"lane_{row}"]) for row in range(ROWS)]
    assert has_order == [saved.get("shuffle", True)] * ROWS
    expected = steps(loaders, 2, 25)
    again = build(tokenizer, 2, options(text, **resumed, local=1))
    for loader in again:
        loader.load_state_dict(state)
    assert torch.equal(steps(again, 1, 25), expected)
    for rank, loader in enumerate(again):  # and so does the checkpoint after that
        stripes = {f"lane_{row}" for row in range(ROWS) if row % 2 == rank}
        assert stripes == {key for key in loader.state_dict() if key.startswith("lane_")}
    assert ["order" in json.loads(union(again)[f"lane_{r}"]) for r in range(ROWS)] == has_order
