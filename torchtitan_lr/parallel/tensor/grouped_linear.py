# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears of one input in one matrix product; each linear keeps its own weight.

The weights are put side by side once per step, in forward, because the outputs are one message
between ranks. Backward adds one product per weight. The concatenation is not saved: a copy per
block would survive when FSDP frees the gathered weights.

Its forward takes ``*inputs``: without gradients, the compiler compares numbers of arguments to
decide if a forward has a context, and is wrong for ``(ctx, x, *weights)`` with two weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _ConcatenatedLinear(torch.autograd.Function):
    """One input; outputs are concatenated."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, *weights = inputs
        ctx.save_for_backward(*inputs)
        return F.linear(x, torch.cat(weights))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        dw = gradient.flatten(0, 1).T @ x.flatten(0, 1)
        dx = summed_products(gradient, weights)
        return (dx, *dw.split([weight.shape[0] for weight in weights]))


def concatenated_linear(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply several linears to one input.

    Args:
        x: Input (b, s, d_in).
        weights: One (d_out_i, d_in) per linear.

    Returns:
        The concatenated outputs, (b, s, Σ d_out_i).
    """
    if len(weights) == 1:
        return F.linear(x, weights[0])
    out: Tensor = _ConcatenatedLinear.apply(x, *weights)
    return out


def summed_products(gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the input of concatenated linears, without concatenating weights.

    Args:
        gradient: Of the concatenated outputs, (b, s, Σ d_out_i).
        weights: One (d_out_i, d_in) per linear.

    Returns:
        Tensor (b, s, d_in); each sum over a linear's outputs is added, in turn, in its dtype.
    """
    sizes = [weight.shape[0] for weight in weights]
    parts = gradient.flatten(0, 1).split(sizes, dim=-1)
    total = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        if torch.compiler.is_compiling():
            total = total + part @ weight  # the compiler fuses sums, and copies for an addmm
        else:
            torch.addmm(total, part, weight, out=total)
    return total.unflatten(0, gradient.shape[:2])
