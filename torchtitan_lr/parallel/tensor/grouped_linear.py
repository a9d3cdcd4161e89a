# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears of one group in one matrix product; each linear keeps its own weight.

These are autograd Functions so that they save the weights for backward, not a concatenated or
stacked copy. A copy per block would survive when FSDP frees the gathered weights.

Their forwards take ``*inputs``: without gradients, the compiler compares numbers of arguments to
decide if a forward has a context, and is wrong for ``(ctx, x, *weights)`` with two weights.
"""

from collections.abc import Sequence
from itertools import groupby
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


class _BatchedLinear(torch.autograd.Function):
    """Concatenated inputs; outputs are stacked."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, *weights = inputs
        ctx.save_for_backward(*inputs)
        out = torch.bmm(_batch(x, len(weights)), torch.stack(weights).mT)  # (n, b s, d_out)
        return out.unflatten(1, x.shape[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        gradient = gradient.flatten(1, 2)
        dx = torch.bmm(gradient, torch.stack(weights))  # (n, b s, r)
        dw = torch.bmm(gradient.mT, _batch(x, len(weights)))  # (n, d_out, r)
        return (dx.transpose(0, 1).reshape(x.shape), *dw.unbind())


def _batch(x: Tensor, n: int) -> Tensor:
    """View (b, s, n r) as a batch (n, b s, r)."""
    return x.unflatten(-1, (n, -1)).flatten(0, 1).transpose(0, 1)


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


def batched_linear(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Apply several linears, each to its own input; adjacent equal shapes share one product.

    Args:
        x: The concatenated inputs, (b, s, Σ r_i).
        weights: One (d_out_i, r_i) per linear.

    Returns:
        One output (b, s, d_out_i) per linear. Under grouped-query attention q has another shape and
        its own product; k and v share one.
    """
    runs = [list(run) for _, run in groupby(weights, key=lambda weight: weight.shape)]
    inputs = x.split([len(run) * run[0].shape[1] for run in runs], dim=-1)
    outputs: list[Tensor] = []
    for part, run in zip(inputs, runs, strict=True):
        if len(run) == 1:
            outputs.append(F.linear(part, run[0]))
        else:
            outputs.extend(_BatchedLinear.apply(part, *run).unbind())
    return outputs
