# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Stripes: which blocks they read, how they cut windows, how they resume."""

import json
from math import gcd

import pytest

from torchtitan_lr.data.blocks import BlockCorpus
from torchtitan_lr.data.stripes import BlockStream, Stripe, stripe_block
from torchtitan_lr.titan.base import BaseTokenizer


class Bytes(BaseTokenizer):
    """A token a byte, 256 before and 257 behind a document."""

    def encode(self, text, add_bos=True, add_eos=True):
        return [256] * add_bos + list(text.encode()) + [257] * add_eos

    def decode(self, token_ids):
        return bytes(i for i in token_ids if i < 256).decode()

    def get_vocab_size(self):
        return 258


class Blocks(BlockCorpus):
    """Blocks given as lists of documents."""

    def __init__(self, blocks):
        super().__init__("blocks", "training.dataset", [])
        self.blocks = blocks

    @property
    def num_blocks(self):
        return len(self.blocks)

    def documents(self, block):
        return iter(self.blocks[block])


def corpus(num_blocks=6):
    return Blocks(
        [[f"b{i}d{d}" * (1 + (i * 3 + d) % 5) for d in range(i % 4)] for i in range(num_blocks)]
    )


@pytest.mark.parametrize(("stripes", "blocks"), [(1, 1), (4, 6), (6, 4), (8, 8), (3, 7), (16, 4)])
def test_a_stripe_reads_every_block_once_in_num_blocks(stripes, blocks):
    for stripe in range(stripes):
        read = [stripe_block(stripe, stripes, blocks, k) for k in range(2 * blocks)]
        assert sorted(read[:blocks]) == list(range(blocks))
        assert read[0] == stripe % blocks
        # The plain rule, as long as the stripe has not been through all it reaches.
        turn = blocks // gcd(blocks, stripes)
        assert read[:turn] == [(stripe + k * stripes) % blocks for k in range(turn)]


def test_stripes_together_read_the_corpus_evenly():
    stripes, blocks = 4, 6
    for turn in range(5):
        counts = [0] * blocks
        for stripe in range(stripes):
            for k in range(turn * 3, turn * 3 + 3):
                counts[stripe_block(stripe, stripes, blocks, k)] += 1
        assert counts == [2] * blocks


def test_windows_are_the_joined_documents_cut():
    source = corpus()
    stripe = Stripe(BlockStream(source, 1, 2, infinite=True), Bytes(), seq_len=10)
    windows = [stripe.next_window() for _ in range(40)]
    expected = []
    for k in range(60):
        for document in source.blocks[stripe_block(1, 2, 6, k)]:
            expected += [256, *document.encode(), 257]
    assert [t for window in windows for t in window] == expected[: 40 * 11]


def test_one_pass_covers_each_document_once_and_ends():
    source = corpus(7)
    seen = []
    for stripe in range(10):  # more stripes than blocks: some have nothing
        stream = BlockStream(source, stripe, 10, infinite=False)
        while (found := stream.next_document()) is not None:
            seen.append(found[1])
        assert stream.next_document() is None
    assert sorted(seen) == sorted(d for block in source.blocks for d in block)


@pytest.mark.parametrize("stop", range(12))
def test_resume_is_exact_wherever_it_stops(stop):
    def fresh():
        return Stripe(BlockStream(corpus(), 1, 4, infinite=True), Bytes(), seq_len=6)

    stripe = fresh()
    for _ in range(stop):
        stripe.next_window()
    stored = json.dumps(stripe.state())
    expected = [stripe.next_window() for _ in range(50)]

    resumed = fresh()
    resumed.load_state(json.loads(stored))
    assert json.dumps(resumed.state()) == stored
    assert [resumed.next_window() for _ in range(50)] == expected

    used = fresh()  # a stripe that stood elsewhere
    for _ in range(7):
        used.next_window()
    used.load_state(json.loads(stored))
    assert [used.next_window() for _ in range(50)] == expected


def test_resume_without_the_offset_differs():
    """Negative control: the offset is what makes a resume in mid-document exact."""

    def fresh():
        return Stripe(BlockStream(corpus(), 3, 4, infinite=True), Bytes(), seq_len=4)

    stripe = fresh()
    stripe.next_window()
    state = stripe.state()
    assert state["offset"] > 0
    expected = stripe.next_window()
    resumed = fresh()
    resumed.load_state(state | {"offset": 0})
    assert resumed.next_window() != expected
