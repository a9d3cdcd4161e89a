# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Products that make their inputs again: exact gradients, and less memory."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan_lr.models.linears import Gated, gated_linear


def plain_silu(h, weight):
    return F.linear(F.silu(h), weight)


def plain_gated(gate, up, weight, silu):
    return F.linear((F.silu(gate) if silu else gate) * up, weight)


def gradients(function, *inputs, **options):
    """The output and the gradients of a function whose first input is used twice."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    loss = (out.square().sum() + leaves[0].sin().sum()).double()
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def error(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0)]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_gradients_are_those_of_autograd(dtype, limit, compiled, silu):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 12), (2, 5, 12), (7, 12))
    gate, up, weight = (torch.randn(s, generator=generator).to(dtype) for s in shapes)

    def remade(gate, up, weight):
        return gated_linear(Gated(gate, up, silu), weight)

    def latent(h, weight):
        return gated_linear(Gated(h, None, True), weight)

    if compiled:
        # Without fusion each bf16 operator rounds, so that this is no place to compare it.
        limit = max(limit, 1e-2 if dtype == torch.bfloat16 else 0)
        torch._dynamo.reset()
        remade = torch.compile(remade, backend="aot_eager", fullgraph=True)
        latent = torch.compile(latent, backend="aot_eager", fullgraph=True)
    expected = gradients(plain_gated, gate, up, weight, silu=silu)
    assert error(gradients(remade, gate, up, weight), expected) <= limit
    assert error(gradients(plain_gated, gate, up, weight, silu=not silu), expected) > 0.1
    expected = gradients(plain_silu, gate, weight)
    assert error(gradients(latent, gate, weight), expected) <= limit
