# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Linears of one input whose gradients share products; each linear keeps its own weight.

The weights are put side by side once per step, in backward. Nothing put side by side is saved: a
copy per block would survive when FSDP frees the gathered weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.models.marks import save


class _GroupedLinears(torch.autograd.Function):
    """One input, one output per weight; backward has one product for each kind of gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        # One variable argument: see `parallel.tensor.grouped_linear`.
        x, *weights = inputs
        ctx.save_for_backward(*inputs)
        return save(lambda: tuple(F.linear(x, weight) for weight in weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        gradient = torch.cat(gradients, dim=-1) if len(gradients) > 1 else gradients[0]
        dw = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        dx = gradient @ (torch.cat(weights) if len(weights) > 1 else weights[0])
        return (dx, *dw.split([weight.shape[0] for weight in weights]))


def grouped_linears(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Apply several linears to one input, with one product per kind of gradient in backward.

    Args:
        x: Input (..., d_in).
        weights: One (d_out_i, d_in) per linear.

    Returns:
        One output (..., d_out_i) per linear, each contiguous; low-rank checkpointing saves them.
    """
    return list(_GroupedLinears.apply(x, *weights))
