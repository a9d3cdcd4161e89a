# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Error feedback on one rank; what needs several is in tests/distributed."""

import torch

from torchtitan_lr.compression.compressor import Compressor
from torchtitan_lr.compression.settings import CODECS

CPU = torch.device("cpu")


def compressor(group, codec="sketch", **options):
    return Compressor("u", CODECS[codec](1, 4, 0.9), [(200, True)], group, CPU, **options)


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
