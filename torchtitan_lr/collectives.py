# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives over the tensor-parallel ranks, described as "forward X, backward Y".

One rank alone communicates nothing: the model of one device is that of T = 1 ranks. The functions
use torch's functional collectives: `torch.compile` traces them, and every call is a
`torch.ops._c10d_functional` operator. Activations are plain local tensors. The docstrings state
whether a tensor is a replica, a shard or one term of a sum.

Known pairs: `copy_to_ranks` and `reduce_over_ranks` are f and g of Megatron-LM (section 3);
`gather_partial` and `scatter_sum` are their sequence-parallel counterparts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.collectives import functional

TOKENS = 1
"""The token dimension of an activation (b, s, d)."""

FEATURES = -1
"""The feature dimension of an activation (b, s, d)."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a tensor, in a form that a compiled graph can hold.

    Args:
        group: Name of their process group.
        size: Their number T.
        rank: This rank's index.
    """

    group: str = ""
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Ranks":
        """Return the ranks of a one-dimensional mesh."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


SINGLE = Ranks()
"""One rank: the model on one device."""


class Edge(nn.Module):
    """A border of the model where ranks communicate: no parameters, and the ranks.

    The model's modules call their edges by name with the linears to apply; a plan replaces edges.

    Args:
        ranks: The tensor-parallel ranks.
    """

    def __init__(self, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        self.ranks = ranks


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; its gradient is this rank's part too."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def start_all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Start summing equal-shaped tensors over the ranks; `wait` makes the result usable."""
    started: Tensor = functional.all_reduce(x.contiguous(), "sum", ranks.group)
    return started


def start_reduce_scatter(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Start a sum over the ranks of which each rank keeps its slice of `dim`; see `wait`."""
    dim %= x.ndim
    # The operator cuts the first dimension, so the ranks' slices go there.
    slices = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous().flatten(0, 1)
    started: Tensor = functional.reduce_scatter_tensor(slices, "sum", ranks.size, ranks.group)
    return started


def wait(started: Tensor) -> Tensor:
    """Wait for the result of `start_all_reduce` or `start_reduce_scatter`.

    The result is a view. If a Function's forward ends in an operator that returns its argument, as
    this one does, torch 2.11's compiler loses the gradient.
    """
    result: Tensor = functional.wait_tensor(started)
    return result.view_as(result)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert with an operator that never returns its argument; `wait` gives the reason."""
    return x if x.dtype == dtype else x.to(dtype)


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum the ranks' tensors, without autograd."""
    return x if ranks.size == 1 else wait(start_all_reduce(x, ranks))


def all_gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Concatenate the ranks' tensors along `dim`, without autograd."""
    if ranks.size == 1:
        return x
    return finish_all_gather(start_all_gather(x, ranks), ranks, dim)


def start_all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """Start gathering equal-shaped tensors of the ranks; see `finish_all_gather`."""
    started: Tensor = functional.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.group)
    return started


def finish_all_gather(started: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Wait for the result of `start_all_gather` and concatenate it along `dim`."""
    dim %= started.ndim
    gathered = wait(started).unflatten(0, (ranks.size, -1))  # the ranks come first
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def own_slice(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this rank's part of `dim`, contiguous, without communication."""
    part = x.chunk(ranks.size, dim)[ranks.rank]
    return part if part.is_contiguous() else part.contiguous()


class _CopyToRanks(torch.autograd.Function):
    """Forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return wait(start_all_reduce(gradient, ctx.ranks)), None


class _ReduceOverRanks(torch.autograd.Function):
    """Forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return wait(start_all_reduce(x, ranks))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherPartial(torch.autograd.Function):
    """Forward all-gather, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return all_gather(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return wait(start_reduce_scatter(gradient, ctx.ranks, ctx.dim)), None, None


class _GatherReplicated(torch.autograd.Function):
    """Forward all-gather, backward slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return all_gather(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(gradient, ctx.ranks, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    """Forward reduce-scatter, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return wait(start_reduce_scatter(x, ranks, dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.ranks, ctx.dim), None, None


class _SplitReplicated(torch.autograd.Function):
    """Forward slice, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return own_slice(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.ranks, ctx.dim), None, None


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Use a replicated tensor in computations that differ by rank (f of Megatron-LM).

    Forward identity, backward all-reduce: every rank's computation contributes to the gradient.
    """
    out: Tensor = x if ranks.size == 1 else _CopyToRanks.apply(x, ranks)
    return out


def reduce_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum the ranks' terms into a replicated tensor (g of Megatron-LM).

    Forward all-reduce, backward identity: the gradient of a sum is that of each term.
    """
    out: Tensor = x if ranks.size == 1 else _ReduceOverRanks.apply(x, ranks)
    return out


def gather_partial(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Gather shards for computations that differ by rank.

    Forward all-gather, backward reduce-scatter: it is `copy_to_ranks` of the gathered tensor.
    """
    out: Tensor = x if ranks.size == 1 else _GatherPartial.apply(x, ranks, dim)
    return out


def gather_replicated(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Gather shards for computations that every rank repeats.

    Forward all-gather, backward slice: the gradient is already complete on every rank.
    """
    out: Tensor = x if ranks.size == 1 else _GatherReplicated.apply(x, ranks, dim)
    return out


def scatter_sum(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Sum the ranks' terms, of which each rank keeps a shard.

    Forward reduce-scatter, backward all-gather: each rank's term reached every shard.
    """
    out: Tensor = x if ranks.size == 1 else _ScatterSum.apply(x, ranks, dim)
    return out


def split_replicated(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Keep a shard of a replicated tensor whose gradient all ranks need whole.

    Forward slice, backward all-gather.
    """
    out: Tensor = x if ranks.size == 1 else _SplitReplicated.apply(x, ranks, dim)
    return out


def wide_reduce_scatter(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Sum the ranks' tensors in fp32 or better, without autograd; each rank keeps its slice.

    An all-reduce adds in the dtype that it sends. CAAT-Net adds the gradients of its partial
    reduction in fp32 and sends them in bf16 (section 4): an all-to-all gives each rank all terms of
    its slice, and the rank adds them and rounds once. With an all-gather of the sums, the volume
    equals that of an all-reduce.

    Args:
        x: One rank's term; ``dim`` divides by the ranks.
        ranks: The tensor-parallel ranks.
        dim: The scattered dimension.

    Returns:
        This rank's slice of the sum, in the dtype of x.
    """
    dim %= x.ndim
    slices = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()  # (T, ...)
    sizes = [1] * ranks.size
    terms = wait(functional.all_to_all_single(slices, sizes, sizes, ranks.group))
    return terms.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def wide_all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum the ranks' tensors in fp32 or better; return the sum in the dtype of x on every rank."""
    if ranks.size == 1:
        return x
    flat = x.flatten()
    padded = F.pad(flat, (0, -flat.numel() % ranks.size))
    total = all_gather(wide_reduce_scatter(padded, ranks, 0), ranks, 0)
    return total[: flat.numel()].view(x.shape)
