# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One message a boundary: packed, unpacked, and with gradients that are packed alike."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble

from torchtitan_lr.compat.pipelining import SPLITS_BACKWARD
from torchtitan_lr.models.linears import Gated, gated_linear
from torchtitan_lr.parallel import stages
from torchtitan_lr.parallel.plans import Boundary
from torchtitan_lr.parallel.stages import Stage, pack, unpack


@pytest.mark.parametrize(
    ("boundary", "stream", "latents"),
    [
        (Boundary(6, 8, ()), (2, 6, 8), []),
        (Boundary(6, 8, (3, 4)), (2, 6, 8), [(2, 6, 3), (2, 6, 4)]),
        # T = 2: the stream's features are sharded, the latents' tokens
        (Boundary(3, 8, (3, 4), 2), (2, 6, 4), [(2, 3, 3), (2, 3, 4)]),
        (Boundary(3, 8, (), 2), (2, 6, 4), []),
        (Boundary(6, 8, (), lanes=2), (2, 6, 2, 4), []),
        (Boundary(6, 8, (), lanes=1), (2, 6, 1, 8), []),
    ],
)
def test_packing_is_undone(boundary, stream, latents):
    sent = [torch.randn(shape, dtype=torch.float64) for shape in (stream, *latents)]
    message = pack(tuple(sent), boundary)
    assert message.shape == (2, *boundary.shape)
    assert message.is_contiguous()
    received = unpack(message.requires_grad_(), boundary)
    assert len(received) == len(sent)
    for a, b in zip(received, sent, strict=True):
        assert a.is_contiguous()
        assert torch.equal(a, b)
    weights = [torch.randn_like(t) for t in sent]
    sum((a * w).sum() for a, w in zip(received, weights, strict=True)).backward()
    assert torch.equal(message.grad, pack(tuple(weights), boundary))
    assert message.grad.is_contiguous()


class SumAndProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x + weight.sum(0), x @ weight

    @staticmethod
    def backward(ctx, of_sum, of_product):
        x, weight = ctx.saved_tensors
        return of_sum + of_product @ weight.T, of_sum.sum(0) + x.T @ of_product


PARTS = {
    "a Function": lambda h, weight: gated_linear(Gated(h, None, True), weight),
    "two outputs": lambda x, weight: torch.mul(*SumAndProduct.apply(x, weight)),
    "one weight used twice": lambda x, weight: torch.tanh(torch.tanh(x @ weight) @ weight),
}


class Part(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.function = PARTS[name]

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_both_halves_of_backward_give_the_gradients(name, splits, group, monkeypatch):
    if splits and not SPLITS_BACKWARD:
        pytest.skip("before torch 2.13 the halves of a stage's backward are wrong")
    monkeypatch.setattr(stages, "SPLITS_BACKWARD", splits)
    parts = nn.Sequential(Part(name), Part(name))
    x = torch.randn(4, 4, dtype=torch.float64)
    expected = torch.autograd.grad(parts(x).sum(), list(parts.parameters()))
    message = torch.empty(2, 4, dtype=torch.float64, device="meta", requires_grad=True)
    shapes = {"input_args": message, "output_args": message, "group": group}
    local = [Stage(part, index, 2, x.device, **shapes) for index, part in enumerate(parts)]
    schedule = ScheduleZBVZeroBubble(
        local, n_microbatches=2, loss_fn=lambda output, _: output.sum(), scale_grads=False
    )
    schedule.step(x, target=x)
    for part, gradient in zip(parts, expected, strict=True):
        torch.testing.assert_close(part.weight.grad, gradient)
