# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Codecs without ranks: W ranks are the leading dimension of one tensor.

Error feedback is that of one rank; what needs several is in tests/distributed.
"""

import pytest
import torch

from tests.support.codecs import reduce_in_process
from torchtitan_lr.compression import codecs, settings, sketch
from torchtitan_lr.compression.codecs import SparseCodec
from torchtitan_lr.compression.compressor import Compressor
from torchtitan_lr.compression.settings import exchange_unit
from torchtitan_lr.compression.sketch import SketchCodec, smallest_theta

W, M = 4, 3001


def rows(w=W, m=M, dtype=torch.float64, seed=0, whole=False):
    """Gradients (w, w, m); whole numbers add up exactly in any order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(w, w, m, generator=generator, dtype=torch.float64)
    return ((x * 1000).round() if whole else x).to(dtype)


def sketch_codec(c, w=W, **options):
    return SketchCodec(w, c, smallest_theta(c, w), **options)


IN_BF16 = [
    SparseCodec(W, theta=0.8, half=True),
    sketch_codec(2, half=True),
    SketchCodec(W, 10, 0.9875, half=True),
]


@pytest.mark.parametrize("codec", IN_BF16, ids=str)
def test_values_in_bf16_lose_less_than_a_step_of_bf16_at_a_time(codec):
    """Of an entry's own size, or in a sketch of the largest that its cells can hold."""
    x = rows(dtype=torch.float32)[0]
    message = codec.encode(x.clone(), 3)
    values = message.swapped["values" if isinstance(codec, SparseCodec) else "sketch"]
    assert values.dtype == torch.bfloat16 and not message.summed
    assert message.lost.any()
    if isinstance(codec, SparseCodec):
        assert (message.lost.abs() <= 2**-8 * message.values.abs()).all()
    else:
        assert (message.lost.abs() <= 2**-7 * values.float().abs().max()).all()
        row, sent = values.shape[1] // 3, message.values - message.lost
        cells = sketch.insert(message.positions, sent, row, 3)
        assert torch.equal(values.float(), cells)  # none was rounded


def test_zeros_have_no_place_in_the_exact_index():
    """As an embedding's gradient has them: the tokens that did not occur."""
    generator = torch.Generator().manual_seed(0)
    occurs = torch.rand(W, W, M, generator=generator) < 0.015
    x = rows(dtype=torch.float32, whole=True) * occurs
    codec = SketchCodec(W, 10, 0.5)
    index = codecs.unpack(codec.encode(x[0].clone(), 0).swapped["index"], M)
    assert torch.equal(index, x[0] != 0)
    totals, owed, counts = reduce_in_process(codec, x, 0)
    assert torch.equal(totals, x.sum(0)) and not owed.any()
    occurring = [int((x[:, owner] != 0).any(0).sum()) for owner in range(W)]
    assert [int(count["indexed"]) for count in counts] == occurring
    # The control: 0.3 of a cell an entry would be far too many, had all of θ's half a place.
    assert 10 * max(occurring) / M < 0.75 < 10 * (1 - 0.5**W)


@pytest.mark.parametrize("seed", range(2))
def test_the_rounds_of_peeling_suffice_at_the_limit(seed, monkeypatch):
    """At 0.75 of the cells 20 thousand entries take 16 rounds or 17, a million takes 17."""
    size = 20_000
    row = -(-int(size / 0.75) // 3)
    places = torch.arange(size)
    values = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).mul(99).round()
    cells = sketch.insert(places[None], values, row, seed)[0]
    for hosts in (("cpu",), ()):  # as on an accelerator
        monkeypatch.setattr(sketch, "HOSTS", hosts)
        found, stuck = sketch.peel(cells, places, size, seed, sketch.ROUNDS)
        assert not stuck.any() and torch.equal(found, values[0])
        assert not sketch.peel(cells, places, size, seed, sketch.ROUNDS - 6)[1].any()
        assert sketch.peel(cells, places, size, seed, 15)[1].any()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("c", [2, 10])
def test_accepted_units_peel(c, ranks):
    """Each of these sketches is the smallest that is accepted at its sparsity."""
    for theta in (smallest_theta(c, ranks), 1 - (1 - smallest_theta(c, ranks)) / 2):
        codec = SketchCodec(ranks, c, theta)
        sizes = range(8, 6000, 8)
        m = next(m for m in sizes if exchange_unit(codec, m, 0, False).compressed)
        stuck = indexed = 0.0
        # 4 to 9% in the mean of many trials, of which a small sketch needs more to show it.
        for seed in range(4 if m > 100 else 40):
            counts = reduce_in_process(codec, rows(ranks, m, torch.float32, seed), seed)[2]
            stuck += sum(float(own["unpeeled"]) for own in counts)
            indexed += sum(float(own["indexed"]) for own in counts)
        assert stuck / indexed < 0.15


def compressor(group, codec="sketch", **options):
    built, cpu = settings.CODECS[codec](1, 4, 0.9), torch.device("cpu")
    return Compressor("u", built, [(200, True)], group, cpu, **options)


def gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, 200, generator=generator) * 1000).round()


def test_what_is_not_sent_is_sent_later(one_rank):
    """Error feedback by hand: each step sends the 20 largest of gradient plus debt, exactly."""
    own, debt = compressor(one_rank), torch.zeros(200)
    for seed in range(5):
        debt += gradient(seed)[0]
        sent, _ = own.exchange_rows(gradient(seed))
        chosen = sent != 0
        assert chosen.sum() == 20 and torch.equal(sent[chosen], debt[chosen])
        debt -= sent
        assert sent[chosen].abs().min() >= debt.abs().max()
        assert torch.equal(own.residual[0], debt)


def test_a_nan_is_sent_and_leaves_the_rest_of_the_residual_as_it_was(one_rank):
    own = compressor(one_rank, "sparse")
    own.exchange_rows(gradient(0))
    before = own.residual.clone()
    sent, _ = own.exchange_rows(torch.full((1, 200), torch.nan))
    unsent = sent.isfinite()
    assert unsent.sum() == 180 and own.residual.isfinite().all()
    assert torch.equal(own.residual[0, unsent], before[0, unsent]) and before[0, unsent].any()
