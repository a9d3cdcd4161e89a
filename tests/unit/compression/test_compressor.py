# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchtitan_lr.compression.codecs import complete
from torchtitan_lr.compression.compressor import Compressor, Span
from torchtitan_lr.compression.sizes import CodecSizes


@pytest.mark.parametrize(("all_reduce", "bits"), [(False, 4.2), (True, 6.0)])
def test_bytes_saved_count_what_returns_to_the_replicas(all_reduce, bits):
    size = 1_600_000
    group, device = SimpleNamespace(size=lambda: 2), torch.device("cpu")
    sizes = CodecSizes("sketch", 10, 0.9875)
    own = Compressor("u", sizes, [Span(size, True)], group, device, all_reduce=all_reduce)
    exchanged = size if all_reduce else 2 * size  # a reduce-scatter's input has a row for each rank
    assert 8 * own.bytes_saved / exchanged == pytest.approx(32 - bits, abs=2e-3)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def exchanges(group, **options):
    """Steps of a compressor on one rank: gradient, what was sent, what is owed afterwards."""
    sizes, spans = CodecSizes("sketch", 4, 0.9), [Span(200, True)]
    own = Compressor("unit", sizes, spans, group, torch.device("cpu"), **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradient = (torch.randn(1, 200, generator=generator) * 1000).round()
        sent, _ = complete(own.exchange_rows(gradient.clone()))
        yield gradient[0], sent, own.residual[0].float().clone()


def test_what_is_not_sent_is_sent_later(one_rank):
    """Error feedback by hand: each step sends the 20 largest of gradient plus debt, exactly."""
    debt = torch.zeros(200)
    for gradient, sent, owed in exchanges(one_rank):
        debt += gradient
        chosen = sent != 0
        assert chosen.sum() == 20 and torch.equal(sent[chosen], debt[chosen])
        debt -= sent
        assert sent[chosen].abs().min() >= debt.abs().max()
        assert torch.equal(owed, debt)


def exchange_once(own, seed):
    generator = torch.Generator().manual_seed(seed)
    return complete(own.exchange_rows(torch.randn(1, 200, generator=generator) * 1000))[0]


@pytest.mark.parametrize("codec", ["sketch", "sparse"])
@pytest.mark.parametrize("skipped", [[7], [7, 8]], ids=["once", "accumulating"])
def test_a_dropped_exchange_leaves_every_bit(one_rank, codec, skipped):
    sizes, device = CodecSizes(codec, 4, 0.9), torch.device("cpu")
    own = Compressor("u", sizes, [Span(200, True)], one_rank, device, revocable=True)
    plain = Compressor("u", sizes, [Span(200, True)], one_rank, device)
    for seed in (0, 1):
        assert torch.equal(exchange_once(own, seed), exchange_once(plain, seed))
        own.commit()
    before = own.residual.clone()
    assert before.any() and torch.equal(before, plain.residual)
    for seed in skipped:
        exchange_once(own, seed)
        exchange_once(plain, seed)
    assert torch.equal(own.residual, before)
    # The control: without the way back, what was sent is gone.
    assert not torch.equal(plain.residual, before)
    own.commit(torch.ones(()))
    own.commit()
    assert torch.equal(own.residual, before)
