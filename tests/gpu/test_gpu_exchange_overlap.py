# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compressed exchanges on a stream of their own: backward does not wait, its end does."""

import pytest
import torch
from torch import Tensor

from torchtitan_lr.compression.compressor import ExchangeStream

CYCLES = 2**31
"""A second or so of a busy stream."""


class Unit(torch.autograd.Function):
    """Starts an exchange in backward, as a unit's communicator does."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("may_wait", [True, False])
def test_backward_goes_on_while_an_exchange_decodes(may_wait: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    queue = ExchangeStream(device)
    gradients, sums = torch.ones(2**20, device=device), torch.zeros(2**20, device=device)
    passed = torch.cuda.Event()

    def exchange() -> None:
        torch.cuda._sleep(CYCLES)
        sums.copy_(2 * gradients)

    def unit() -> None:
        queue.run(exchange, [sums, gradients], may_wait)

    torch.cuda.synchronize()
    finished: list[bool] = []

    def next_unit() -> None:
        passed.record()
        torch.cuda._sleep(CYCLES // 100)
        waited = torch.cuda.Event()
        waited.record()
        while not waited.query() and len(finished) == 0:
            if passed.query():
                finished.append(not _is_busy(queue))
        finished.append(not _is_busy(queue))

    x = torch.ones(1, requires_grad=True)
    Unit.apply(Unit.apply(x, next_unit), unit).sum().backward()
    assert finished[0] != may_wait
    copied: Tensor = sums + 0  # on the stream that ran backward
    torch.cuda.synchronize()
    assert torch.equal(copied, torch.full_like(copied, 2.0))


def _is_busy(queue: ExchangeStream) -> bool:
    return not queue._ended.query()
