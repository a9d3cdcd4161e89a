# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Column-parallel linears together with the collectives of their shared input.

Every rank has the whole input and a shard of each output, so each rank has one term of the input's
gradient. Linears and collective are one autograd Function because of its backward: the reduction of
that gradient runs while the gradients of the weights are computed. Under BTP the linears are a
group's B and the input is r wide; under the vanilla and Megatron plans the input is d wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.models.marks import save
from torchtitan_lr.parallel.tensor.collectives import (
    Ranks,
    all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from torchtitan_lr.parallel.tensor.grouped_linear import summed_products


@dataclass(frozen=True)
class SharedInput:
    """How the input of column-parallel linears arrives.

    Args:
        ranks: The tensor-parallel ranks.
        dim: The sharded dimension, which forward gathers and backward reduce-scatters; None for a
            replicated input, whose gradient is all-reduced.
        saved: What low-rank checkpointing saves: the gathered ``input``, the ``output``, or
            nothing.
        separate: Whether each linear has its own part of the input's features. Otherwise all
            linears have the same input.
    """

    ranks: Ranks
    dim: int | None = None
    saved: str = ""
    separate: bool = False

    def whole(self, x: Tensor) -> Tensor:
        """Return the input with all of its shards."""
        if self.dim is None:
            return x
        dim = self.dim
        if self.saved != "input":
            return all_gather(x, self.ranks, dim)
        (gathered,) = save(lambda: (all_gather(x, self.ranks, dim),))
        return gathered

    def start_sum(self, gradient: Tensor) -> Tensor:
        """Start the sum of the whole input's gradient over the ranks; see `collectives.wait`."""
        if self.dim is None:
            return start_all_reduce(gradient, self.ranks)
        return start_reduce_scatter(gradient, self.ranks, self.dim)


class _SharedLinear(torch.autograd.Function):
    """Forward a gather of the input, if it is sharded; backward the sum of its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # One variable argument: see `grouped_linear`.
        x, shared, *weights = inputs
        whole = shared.whole(x)
        ctx.save_for_backward(whole, *weights)
        ctx.shared = shared
        if not shared.separate:
            if shared.saved == "output":
                return save(lambda: (F.linear(whole, _concatenated(weights)),))
            return (F.linear(whole, _concatenated(weights)),)
        return tuple(
            F.linear(part, run[0]) if len(run) == 1 else torch.bmm(part, torch.stack(run).mT)
            for part, run in _parts(whole, weights)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        shared = ctx.shared
        if not shared.separate:
            (gradient,) = gradients
            summed = shared.start_sum(summed_products(gradient, weights))
            dw = gradient.flatten(0, 1).T @ whole.flatten(0, 1)  # during the reduction
            sizes = [weight.shape[0] for weight in weights]
            return (wait(summed), None, *dw.split(sizes))
        summed = shared.start_sum(_input_gradient(gradients, weights).view_as(whole))
        dweights: list[Tensor] = []
        for gradient, (part, run) in zip(gradients, _parts(whole, weights), strict=True):
            if len(run) == 1:
                dweights.append(gradient.flatten(0, 1).T @ part.flatten(0, 1))
            else:
                dweights.extend(torch.bmm(gradient.mT, part).unbind())
        return (wait(summed), None, *dweights)


def _concatenated(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _parts(whole: Tensor, weights: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Pair each run of n weights of equal shape with its input (b, s, r), or (n, b·s, r) if n > 1.

    Under grouped-query attention q has another shape and its own product; k and v share one.
    """
    runs = _runs(weights)
    parts = whole.split([len(run) * run[0].shape[1] for run in runs], dim=-1)
    return [
        (part if len(run) == 1 else _stacked(part, len(run)), run)
        for part, run in zip(parts, runs, strict=True)
    ]


def _runs(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    return [list(run) for _, run in groupby(weights, key=lambda weight: weight.shape)]


def _stacked(x: Tensor, n: int) -> Tensor:
    """View (b, s, n r) as a batch (n, b s, r)."""
    return x.unflatten(-1, (n, -1)).flatten(0, 1).transpose(0, 1)


def _input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient (b·s, Σ r_i) of the inputs, from one gradient per run of weights."""
    by_weight: list[Tensor] = []
    for gradient, run in zip(gradients, _runs(weights), strict=True):
        by_weight += [gradient.flatten(0, 1)] if len(run) == 1 else gradient.unbind()
    pairs = list(zip(by_weight, weights, strict=True))
    if torch.compiler.is_compiling():
        return torch.cat([gradient @ weight for gradient, weight in pairs], -1)
    widths = [weight.shape[1] for weight in weights]
    out = by_weight[0].new_empty(by_weight[0].shape[0], sum(widths))
    for (gradient, weight), part in zip(pairs, out.split(widths, dim=-1), strict=True):
        torch.mm(gradient, weight, out=part)
    return out


def shared_linear(x: Tensor, weights: Sequence[Tensor], shared: SharedInput) -> Tensor:
    """Apply column-parallel linears to one input that all ranks share.

    Args:
        x: Input (b, s, d_in), replicated or sharded along ``shared.dim``.
        weights: One (d_out_i/T, d_in), Shard(0), per linear.
        shared: How x arrives.

    Returns:
        The concatenated outputs, (b, s, Σ d_out_i/T).
    """
    (out,) = _SharedLinear.apply(x, shared, *weights)
    return out


def shared_linears(x: Tensor, weights: Sequence[Tensor], shared: SharedInput) -> list[Tensor]:
    """Apply column-parallel linears, each to its own input; all ranks share the inputs.

    Args:
        x: The inputs concatenated along the features, (b, s, Σ d_in_i), replicated or sharded along
            ``shared.dim``.
        weights: One (d_out_i/T, d_in_i), Shard(0), per linear.
        shared: How x arrives, with ``separate``.

    Returns:
        One output (b, s, d_out_i/T), Shard(-1), per linear.
    """
    outputs = _SharedLinear.apply(x, shared, *weights)
    found: list[Tensor] = []
    for out, run in zip(outputs, _runs(weights), strict=True):
        # The product of a run of n is (n, b·s, d_out/T).
        found += [out] if len(run) == 1 else out.unflatten(1, (x.shape[0], -1)).unbind()
    return found
