# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives over tensor- or context-parallel ranks, without autograd, on plain local tensors.

The functions use torch's functional collectives: `torch.compile` traces them, and every call is a
`torch.ops._c10d_functional` operator. `parallel.paired` has them with their partners in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.dispatch import results_are_cached
from torchtitan_lr.compat.process_groups import functional

TOKENS, FEATURES = 1, -1  # dimensions of an activation (b, s, d)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a tensor, in a form that a compiled graph can hold."""

    group: str = ""  # name of their process group
    size: int = 1
    rank: int = 0  # this one

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Ranks":
        """Return the ranks of a one-dimensional mesh."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


SINGLE = Ranks()  # the model on one device


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; its gradient is this rank's part too."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def start_sum(x: Tensor, ranks: Ranks, dim: int | None = None, owned: bool = False) -> Tensor:
    """Start summing equal-shaped tensors over the ranks; `wait` makes the result usable."""
    # Each rank keeps its slice of dimension ``dim`` of the sum; None is for the whole sum, which
    # takes the memory of x if the caller gives that away (``owned``). Otherwise x keeps its values.
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
    """Wait for a started collective, and return a view of its result."""
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
    """Return the sum of the ranks' tensors, or its slice of ``dim``; see `start_sum`."""
    # ``wide`` sums in fp32 or better, by an all-to-all, and returns the dtype of x.
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
    """Concatenate the ranks' tensors along a dimension, without autograd."""
    # Each tensor is equal in shape on all ranks. All gathers start before the first is awaited.
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
