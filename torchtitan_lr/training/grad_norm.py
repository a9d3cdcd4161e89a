# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The norm of the full gradient."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from torchtitan_lr.compat.dtensor import StridedShard, local_part


@torch.no_grad()
def gradient_norm(gradients: Iterable[torch.Tensor], fp64: bool | None = None) -> torch.Tensor:
    """Return the joint 2-norm of this rank's parts of some gradients.

    On a CPU torch sums the squares of a large fp32 tensor sequentially, with an error of 2e-5 for
    a million entries that depends on the sharding. The squares of CPU gradients are therefore
    summed in fp64.

    Args:
        gradients: Plain tensors or DTensors.
        fp64: Whether to sum the squares in fp64; by default only if all gradients are on a CPU.

    Returns:
        A plain scalar.
    """
    parts = [local_part(gradient) for gradient in gradients]
    if fp64 is None:
        fp64 = all(part.device.type == "cpu" for part in parts)
    if fp64:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return torch.linalg.vector_norm(torch.stack(norms))
    return get_total_norm(parts, foreach=True)


@torch.no_grad()
def square_share(gradients: Iterable[torch.Tensor], stages: int = 1) -> torch.Tensor:
    """Return this rank's share of the squared norm of the full gradient.

    The shares of all ranks add up to it: a part of which several ranks hold a copy is divided by
    their number. The sum over ranks can thus travel with other sums in one collective.

    Args:
        gradients: Of all parameters of this rank, reduced; plain tensors or DTensors.
        stages: Pipeline stages; each has parameters of its own.

    Returns:
        A plain fp64 scalar.
    """
    ranks = dist.get_world_size() // stages if dist.is_initialized() else 1
    alike: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[ranks // _shards(gradient)].append(gradient)
    shares = [gradient_norm(same).double().square() / n for n, same in alike.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


def _shards(tensor: torch.Tensor) -> int:
    """Return into how many parts the ranks split a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    splits = [isinstance(placement, Shard | StridedShard) for placement in tensor.placements]
    sizes = zip(tensor.device_mesh.shape, splits, strict=True)
    return math.prod(size for size, split in sizes if split)
