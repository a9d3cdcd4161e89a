# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears of one input in one matrix product; each linear keeps its own weight.

This is an autograd Function so that it saves the weights for backward, not a concatenated copy. A
copy per block would survive when FSDP frees the gathered weights.

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
        dx = gradient @ torch.cat(weights)
        dw = gradient.flatten(0, 1).T @ x.flatten(0, 1)
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
