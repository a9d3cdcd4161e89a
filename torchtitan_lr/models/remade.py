# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Products that keep what their input was made of, and make the input again in backward.

A product keeps its input for the gradient of its weight. Where the input is an element-wise
function of tensors that backward needs anyway, keeping it is waste: σ(h) beside h, and silu(gate) ·
up beside gate and up. Memory falls by r for every bottleneck with σ but a block's last, and by 2 f
for every SwiGLU, per token, for one more element-wise pass each.

In compiled blocks the compiler decides what is kept (`compat.compiler`).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan_lr.models.marks import save


class Gated(NamedTuple):
    """The hidden units σ(gate) · up, not multiplied yet."""

    gate: Tensor
    """(b, s, f)."""

    up: Tensor
    """(b, s, f)."""

    silu: bool
    """Whether σ is SiLU; otherwise it is the identity."""

    def product(self) -> Tensor:
        """Multiply."""
        return (F.silu(self.gate) if self.silu else self.gate) * self.up


def remakes(x: Tensor) -> bool:
    """Return whether the products below can be used on an input like x.

    Without gradients they have no use, and under autocast their backward would meet two dtypes.
    """
    device = x.device.type
    # `torch.amp.is_autocast_available` would break the compiled graph in torch 2.11.
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.is_grad_enabled() and not autocast


def silu_linear(h: Tensor, weight: Tensor) -> Tensor:
    """Apply B σ(h) with σ = SiLU; keeps h and not σ(h) (CoLA, Eq. 3).

    Args:
        h: Latent (b, s, r).
        weight: B, (d_out, r).

    Returns:
        Tensor (b, s, d_out).
    """
    out: Tensor = _SiluLinear.apply(h, weight)
    return out


def gated_linear(hidden: Gated, weight: Tensor) -> Tensor:
    """Apply A (σ(gate) · up); keeps gate and up, and neither σ(gate) nor the product.

    Args:
        hidden: Both factors (b, s, f).
        weight: A, (r, f).

    Returns:
        Tensor (b, s, r).
    """
    out: Tensor = _GatedLinear.apply(*hidden, weight)
    return out


class _SiluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return F.linear(F.silu(h), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        dweight = _weight_gradient(gradient, F.silu(h))
        return _silu_backward(gradient @ weight, h), dweight


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, silu: bool, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.silu = silu
        (out,) = save(lambda: (F.linear(Gated(gate, up, silu).product(), weight),))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        gate, up, weight = ctx.saved_tensors
        active = F.silu(gate) if ctx.silu else gate
        dweight = _weight_gradient(gradient, active * up)
        dproduct = gradient @ weight
        dup = dproduct * active
        dactive = dproduct.mul_(up)
        return _silu_backward(dactive, gate) if ctx.silu else dactive, dup, None, dweight


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).T @ x.flatten(0, -2)


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.silu_backward(gradient, x)
    return out
