# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives over the tensor-parallel ranks, described as "forward X, backward Y".

One rank alone communicates nothing: the model of one device is that of T = 1 ranks. The functions
use torch's functional collectives: `torch.compile` traces them, and every call is a
`torch.ops._c10d_functional` operator. Activations are plain local tensors. The docstrings state
whether a tensor is a replica, a shard or one term of a sum.

Known pairs: `copy_to_ranks` and `reduce_over_ranks` are f and g of Megatron-LM (section 3);
`gather_partial` and `scatter_sum` are their sequence-parallel counterparts.

The edges of the model compute by `save` what backward must not compute twice: the r-wide latents,
with the collective behind them, and the norms' statistics. Without low-rank checkpointing
(`parallel.recompute`) `save` only calls its argument.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.collectives import functional
from torchtitan_lr.compat.compiler import lower_as_identity
from torchtitan_lr.compat.dispatch import results_are_cached

T = TypeVar("T", bound=tuple[Any, ...])

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
    """A border of the model where ranks communicate: no parameters, the ranks, and options.

    The model's modules call their edges by name with the linears to apply; a plan replaces edges.
    A subclass states its options as class attributes, with their defaults.

    Args:
        ranks: The tensor-parallel ranks.
        **options: Values of the subclass' options.

    Raises:
        AttributeError: The subclass has no such option.
    """

    def __init__(self, ranks: Ranks = SINGLE, **options: Any) -> None:
        super().__init__()
        self.ranks = ranks
        for name, value in options.items():
            getattr(self, name)  # a misspelt option would otherwise have no effect
            setattr(self, name, value)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; its gradient is this rank's part too."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def start_sum(x: Tensor, ranks: Ranks, dim: int | None = None, owned: bool = False) -> Tensor:
    """Start summing equal-shaped tensors over the ranks; `wait` makes the result usable.

    Args:
        x: One rank's term.
        ranks: More than one rank.
        dim: Each rank keeps its slice of this dimension of the sum; None for the whole sum.
        owned: Whether the caller gives x away: the whole sum then takes its memory. Otherwise x
            keeps its values.
    """
    if dim is None:
        if torch.compiler.is_compiling():  # it drops the copy that the operator makes
            started: Tensor = functional.all_reduce(x.contiguous(), "sum", ranks.group)
            return started
        may_overwrite = owned and not results_are_cached()
        term = x.contiguous() if may_overwrite else x.clone(memory_format=torch.contiguous_format)
        started = functional.all_reduce_(term, "sum", ranks.group)
        return started
    dim %= x.ndim
    # The operator cuts the first dimension, so the ranks' slices go there.
    slices = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous().flatten(0, 1)
    started = functional.reduce_scatter_tensor(slices, "sum", ranks.size, ranks.group)
    return started


def wait(started: Tensor) -> Tensor:
    """Wait for the result of a collective that was started; returns a view of it."""
    result: Tensor = functional.wait_tensor(started)
    # Torch 2.11's compiler loses the gradient of a Function whose forward ends in an operator that
    # returns its argument, as the wait does.
    return result.view_as(result)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert with an operator that never returns its argument; `wait` gives the reason."""
    return x if x.dtype == dtype else x.to(dtype)


def reduce(
    x: Tensor, ranks: Ranks, dim: int | None = None, wide: bool = False, owned: bool = False
) -> Tensor:
    """Sum the ranks' tensors, without autograd.

    Args:
        x: One rank's term; ``dim`` divides by the ranks.
        ranks: The ranks; one rank sums nothing.
        dim: As in `start_sum`.
        wide: Whether to sum in fp32 or better, by an all-to-all.
        owned: As in `start_sum`.

    Returns:
        The sum, or this rank's slice of it, in the dtype of x.
    """
    if ranks.size == 1:
        return x
    if not wide:
        return wait(start_sum(x, ranks, dim, owned))
    if dim is None:
        flat = x.flatten()
        padded = F.pad(flat, (0, -flat.numel() % ranks.size))
        (total,) = all_gather([reduce(padded, ranks, 0, wide)], ranks, 0)
        return total[: flat.numel()].view(x.shape)
    # The operator adds in the dtype that it sends. CAAT-Net adds the gradients of its partial
    # reduction in fp32 and sends them in bf16 (section 4): each rank gets all terms of its slice,
    # adds them and rounds once. With an all-gather, the volume equals that of an all-reduce.
    dim %= x.ndim
    slices = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()  # (T, ...)
    sizes = [1] * ranks.size
    terms = wait(functional.all_to_all_single(slices, sizes, sizes, ranks.group))
    return terms.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def all_gather(tensors: Sequence[Tensor], ranks: Ranks, dim: int) -> list[Tensor]:
    """Concatenate the ranks' tensors along a dimension, without autograd.

    Args:
        tensors: This rank's tensors; each is equal in shape on all ranks. All gathers start before
            the first is awaited.
        ranks: The ranks; one rank gathers nothing.
        dim: The gathered dimension.
    """
    if ranks.size == 1:
        return list(tensors)
    gather = functional.all_gather_into_tensor
    started = [gather(x.contiguous(), ranks.size, ranks.group) for x in tensors]
    gathered = [wait(x).unflatten(0, (ranks.size, -1)) for x in started]  # the ranks come first
    dims = [dim % x.ndim for x in tensors]
    return [x.movedim(0, d).flatten(d, d + 1) for x, d in zip(gathered, dims, strict=True)]


def own_slice(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this rank's part of `dim`, contiguous, without communication."""
    part = x.chunk(ranks.size, dim)[ranks.rank]
    return part if part.is_contiguous() else part.contiguous()


_thread = threading.local()
_marks_in_graphs = False

_library = torch.library.Library("torchtitan_lr", "FRAGMENT")
_library.define("keep(Tensor x) -> Tensor")
_library.impl("keep", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd("torchtitan_lr::keep", lambda ctx, gradient: gradient, lib=_library)


def save(compute: Callable[[], T]) -> T:
    """Compute tensors that backward takes from forward when it recomputes the rest.

    Call it where autograd records nothing: in the forward of an autograd Function.

    Args:
        compute: Returns a tuple of tensors. Its other effects happen in forward only.

    Returns:
        The tensors; in a compiled graph behind `keep`, which costs nothing: there the compiler
        drops what only leads to saved tensors.

    Raises:
        RuntimeError: In backward, a saved tensor was changed in place since.
    """
    if torch.compiler.is_compiling():
        made: Any = compute()
        if _marks_in_graphs:
            made = tuple(torch.ops.torchtitan_lr.keep(x) for x in made)
        return made
    running = getattr(_thread, "running", None)
    return compute() if running is None else running.save(compute)


def end_recomputation(*last: Tensor | None) -> None:
    """End a recomputation that needs only these tensors: backward does not need what they yield.

    Call it in the forward of an autograd Function before its product, with what the Function saves.
    Autograd itself collects that only afterwards: the block's last product would run for nothing.
    """
    running = None if torch.compiler.is_compiling() else getattr(_thread, "running", None)
    if running is not None:
        running.end_with([x for x in last if x is not None])


@contextmanager
def saved_by(recomputation: Any) -> Iterator[None]:
    """Let `save` of this thread call a `Recomputation`'s own ``save``."""
    outer, _thread.running = getattr(_thread, "running", None), recomputation
    try:
        yield
    finally:
        _thread.running = outer


def mark_in_graphs() -> None:
    """Let graphs that are compiled from now on contain the marks, and cost nothing there."""
    global _marks_in_graphs
    _marks_in_graphs = True
    lower_as_identity(torch.ops.torchtitan_lr.keep.default)


_OPERATIONS: dict[str, Callable[[Tensor, Ranks, int], Tensor]] = {
    "identity": lambda x, ranks, dim: x.view_as(x),
    "slice": own_slice,
    "all_reduce": lambda x, ranks, dim: wait(start_sum(x, ranks)),
    "all_gather": lambda x, ranks, dim: all_gather([x], ranks, dim)[0],
    "reduce_scatter": lambda x, ranks, dim: wait(start_sum(x, ranks, dim)),
    "wide_reduce_scatter": partial(reduce, wide=True),
}


class _Pair(torch.autograd.Function):
    """Forward one of `_OPERATIONS`, backward another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, pair: tuple[str, str]) -> Tensor:
        ctx.ranks, ctx.dim, ctx.backward_operation = ranks, dim, pair[1]
        return _OPERATIONS[pair[0]](x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _OPERATIONS[ctx.backward_operation](gradient, ctx.ranks, ctx.dim), None, None, None


def run_pair(x: Tensor, ranks: Ranks, dim: int = FEATURES, *, pair: tuple[str, str]) -> Tensor:
    """Apply an operation on the ranks' tensors whose gradient is another one's result.

    Args:
        x: This rank's tensor.
        ranks: The tensor-parallel ranks; one rank does nothing.
        dim: The dimension that is cut or put together.
        pair: The operation of forward and that of backward.
    """
    # One rank gets its tensor back, without a node in the graph.
    out: Tensor = x if ranks.size == 1 else _Pair.apply(x, ranks, dim, pair)
    return out


copy_to_ranks = partial(run_pair, pair=("identity", "all_reduce"))
"""Use a replicated tensor in computations that differ by rank (f of Megatron-LM).

Every rank's computation contributes to the gradient."""

reduce_over_ranks = partial(run_pair, pair=("all_reduce", "identity"))
"""Sum the ranks' terms into a replicated tensor (g of Megatron-LM).

The gradient of a sum is that of each term."""

gather_partial = partial(run_pair, pair=("all_gather", "reduce_scatter"))
"""Gather shards for computations that differ by rank: `copy_to_ranks` of the gathered tensor."""

gather_partial_wide = partial(run_pair, pair=("all_gather", "wide_reduce_scatter"))
"""As `gather_partial`; backward sums in fp32 while it sends half precision."""

gather_replicated = partial(run_pair, pair=("all_gather", "slice"))
"""Gather shards for computations that every rank repeats: each rank has the whole gradient."""

scatter_sum = partial(run_pair, pair=("reduce_scatter", "all_gather"))
"""Sum the ranks' terms, of which each rank keeps a shard: each term reached every shard."""

split_replicated = partial(run_pair, pair=("slice", "all_gather"))
"""Keep a shard of a replicated tensor whose gradient all ranks need whole."""
