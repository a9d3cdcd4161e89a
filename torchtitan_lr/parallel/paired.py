# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives with their partners in backward.

Every one is an autograd Function of its own, so that a profile or a graph shows it by name. The
names are Megatron-LM's (section 3), and those of its sequence parallelism:

==============================  ==================  ==================
function                        forward             backward
==============================  ==================  ==================
`copy_to_ranks` (f)             --                  all-reduce
`reduce_from_ranks` (g)         all-reduce          --
`gather_from_ranks`             all-gather          own slice
`scatter_to_ranks`              own slice           all-gather
`gather_and_copy_to_ranks`      all-gather          reduce-scatter
`reduce_scatter_to_ranks`       reduce-scatter      all-gather
==============================  ==================  ==================

A wrong partner gives wrong gradients and no error: the comments say what each is for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.collectives import FEATURES, Ranks, all_gather, own_slice, reduce
from torchtitan_lr.models.low_rank_checkpoint import keep


def paired(
    name: str,
    there: Callable[[Tensor, Ranks, int], Tensor],
    back: Callable[[Tensor, Ranks, int], Tensor],
) -> Callable[..., Tensor]:
    """Return what calls ``there``; the gradient is what ``back`` makes of the result's."""

    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return there(x, ranks, dim)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return back(gradient, ctx.ranks, ctx.dim), None, None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)

    def call(x: Tensor, ranks: Ranks, dim: int = FEATURES) -> Tensor:
        out: Tensor = function.apply(x, ranks, dim)
        return out

    return call


def same(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return a tensor as it is."""
    return x.view_as(x)


def total(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the sum over the ranks."""
    return reduce(x, ranks)


def gathered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the ranks' tensors side by side along ``dim``."""
    return all_gather([x], ranks, dim)[0]


def kept(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the same, which low-rank checkpointing keeps."""
    (whole,) = keep(lambda: tuple(all_gather([x], ranks, dim)))
    return whole


# Uses a replicated tensor in computations that differ by rank: each adds to its gradient.
copy_to_ranks = paired("CopyToRanks", same, total)
# Sums the ranks' terms into a replicated tensor, whose gradient is that of each term.
reduce_from_ranks = paired("ReduceFromRanks", total, same)
# Gathers shards of ``dim`` for computations that every rank repeats, with whole gradients.
gather_from_ranks = paired("GatherFromRanks", gathered, own_slice)
# Keeps a shard along ``dim`` of a replicated tensor whose gradient all ranks need whole.
scatter_to_ranks = paired("ScatterToRanks", own_slice, gathered)
# Gathers shards of ``dim`` for computations that differ by rank; compare `copy_to_ranks`.
gather_and_copy_to_ranks = paired("GatherAndCopyToRanks", kept, reduce)
# Sums the ranks' terms; each rank keeps a shard of ``dim``, which every term reached. Not an
# all-reduce and a slice: its forward is the same, but it loses gradients.
reduce_scatter_to_ranks = paired("ReduceScatterToRanks", reduce, gathered)
