# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Edges of tensor-parallel blocks, and collectives with their partners in backward.

A plan replaces modules of the one-device model by edges, which call the collectives. Every
collective with a gradient is an autograd Function, so that a profile or a graph shows it by name.
The names are Megatron-LM's (section 3), and those of its sequence parallelism:

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

A wrong partner gives wrong gradients and no error: the docstrings say what each is for.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.collectives import (
    FEATURES,
    TOKENS,
    Ranks,
    all_gather,
    local,
    own_slice,
    reduce,
)
from torchtitan_lr.models.ends import linear_loss
from torchtitan_lr.models.kept import keep
from torchtitan_lr.models.linears import LowRankLinear, mix


class Edge(nn.Module):
    """A border where ranks communicate, with the arguments of the module that it replaces."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks


class MixEdge(Edge):
    """LaX: add the previous block's latents, projection by projection; see `models.linears.Mix`."""

    def __init__(self, ranks: Ranks, sharded: bool) -> None:
        super().__init__(ranks)
        self.sharded = sharded  # whether a rank holds a part of each latent, along r or the tokens

    def forward(
        self,
        latents: Sequence[Tensor],
        carried: Sequence[Tensor] | None,
        linears: Sequence[LowRankLinear],
    ) -> list[Tensor]:
        """Compute A_i x_i + g · A_(i-1) x_(i-1), in the plan's layout of the latents."""
        if carried is None:
            return list(latents)
        gates = {i: local(m.gate) for i, m in enumerate(linears) if m.gate is not None}
        if gates and self.sharded:  # the gates' gradients are sums; one collective for the group
            copies = copy_to_ranks(torch.cat(list(gates.values())), self.ranks).split(1)
            gates = dict(zip(gates, copies, strict=True))
        return mix(latents, carried, [gates.get(i) for i in range(len(linears))])


class EmbedEdge(Edge):
    """Looks tokens up, for a residual stream that every rank has whole."""

    def __init__(self, ranks: Ranks, comm: str = "all_reduce") -> None:
        super().__init__(ranks)
        self.comm = comm

    def forward(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look (b, s) up in weight (V, d/T), Shard(1): (b, s, d), for ``sequence`` (b, s/T, d)."""
        x = F.embedding(tokens, local(embedding.weight))  # (b, s, d/T)
        x = gather_from_ranks(x, self.ranks)  # (b, s, d)
        return scatter_to_ranks(x, self.ranks, TOKENS) if self.comm == "sequence" else x


class HeadEdge(Edge):
    """The final norm on all features, then the output projection, weight (V/T, d), Shard(0)."""

    def __init__(self, ranks: Ranks, loss_parallel: bool) -> None:
        super().__init__(ranks)
        self.loss_parallel = loss_parallel

    def forward(
        self, x: Tensor, norm: nn.RMSNorm, output: nn.Linear, targets: Tensor | None = None
    ) -> Tensor:
        """Return logits (b, s, V), or with targets (b, s), replicated, the loss (`linear_loss`)."""
        # With ``loss_parallel`` logits are a DTensor with Shard(-1), for torch's context of that
        # name; else they are gathered, and targets are not used. The loss sends the log-sum-exps
        # of every chunk of tokens, and itself.
        weight = local(output.weight)
        x = self.normalized(x, norm)
        if targets is not None and self.loss_parallel:
            return linear_loss(x, weight, targets, self.ranks)
        logits = self.logits(x, weight)  # (b, s, V/T)
        if self.loss_parallel:
            mesh = cast(DTensor, output.weight).device_mesh
            return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)
        return gather_from_ranks(logits, self.ranks)

    def normalized(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Return the normalized stream (b, s, d), replicated; its gradient is summed over ranks."""
        # Plans whose residual stream is not replicated override this.
        return copy_to_ranks(normalize(x, norm), self.ranks)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the scores (b, s, V/T) of a normalized stream."""
        return F.linear(x, weight)


def normalize(x: Tensor, norm: nn.RMSNorm, ranks: Ranks | None = None) -> Tensor:
    """Normalize whole features (..., d) with a replicated weight (d,)."""
    # The gradient of the kernel is that of this rank's stream. It is summed over ``ranks``, whose
    # streams differ (token shards, lanes); None is for a replicated stream.
    weight = local(norm.weight)
    if ranks is not None:
        weight = copy_to_ranks(weight, ranks)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


class CopyToRanks(torch.autograd.Function):
    """Forward nothing, backward an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce(gradient, ctx.ranks), None


def copy_to_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Use a replicated tensor in computations that differ by rank: each adds to its gradient."""
    out: Tensor = CopyToRanks.apply(x, ranks)
    return out


class ReduceFromRanks(torch.autograd.Function):
    """Forward an all-reduce, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return reduce(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.view_as(gradient), None


def reduce_from_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum the ranks' terms into a replicated tensor, whose gradient is that of each term."""
    out: Tensor = ReduceFromRanks.apply(x, ranks)
    return out


class GatherFromRanks(torch.autograd.Function):
    """Forward an all-gather, backward this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return all_gather([x], ranks, dim)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(gradient, ctx.ranks, ctx.dim), None, None


def gather_from_ranks(x: Tensor, ranks: Ranks, dim: int = FEATURES) -> Tensor:
    """Gather shards of ``dim`` for computations that every rank repeats, with whole gradients."""
    out: Tensor = GatherFromRanks.apply(x, ranks, dim)
    return out


class ScatterToRanks(torch.autograd.Function):
    """Forward this rank's slice, backward an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return own_slice(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather([gradient], ctx.ranks, ctx.dim)[0], None, None


def scatter_to_ranks(x: Tensor, ranks: Ranks, dim: int = FEATURES) -> Tensor:
    """Keep a shard along ``dim`` of a replicated tensor whose gradient all ranks need whole."""
    out: Tensor = ScatterToRanks.apply(x, ranks, dim)
    return out


class GatherAndCopyToRanks(torch.autograd.Function):
    """Forward an all-gather, backward a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, wide_sums: bool) -> Tensor:
        ctx.ranks, ctx.dim, ctx.wide_sums = ranks, dim, wide_sums
        (gathered,) = keep(lambda: tuple(all_gather([x], ranks, dim)))
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce(gradient, ctx.ranks, ctx.dim, ctx.wide_sums), None, None, None


def gather_and_copy_to_ranks(
    x: Tensor, ranks: Ranks, dim: int = FEATURES, wide_sums: bool = False
) -> Tensor:
    """Gather shards of ``dim`` for computations that differ by rank; compare `copy_to_ranks`."""
    # With ``wide_sums`` backward sums in fp32 while it sends half precision.
    out: Tensor = GatherAndCopyToRanks.apply(x, ranks, dim, wide_sums)
    return out


class ReduceScatterToRanks(torch.autograd.Function):
    """Forward a reduce-scatter, backward an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return reduce(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather([gradient], ctx.ranks, ctx.dim)[0], None, None


def reduce_scatter_to_ranks(x: Tensor, ranks: Ranks, dim: int = FEATURES) -> Tensor:
    """Sum the ranks' terms; each rank keeps a shard of ``dim``, which every term reached."""
    # Not an all-reduce and a slice: its forward is the same, but it loses gradients.
    out: Tensor = ReduceScatterToRanks.apply(x, ranks, dim)
    return out


def summed_products(gradient: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient (b, s, d_in) of the input of linears (d_out_i, d_in) side by side."""
    # The gradient of the outputs is (b, s, Σ d_out_i). Weights are not concatenated: each sum over
    # a linear's outputs is added, in turn, in its dtype.
    sizes = [weight.shape[0] for weight in weights]
    parts = gradient.flatten(0, 1).split(sizes, dim=-1)
    total = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        if torch.compiler.is_compiling():
            total = total + part @ weight  # the compiler fuses sums, and copies for an addmm
        else:
            torch.addmm(total, part, weight, out=total)
    return total.unflatten(0, gradient.shape[:2])
