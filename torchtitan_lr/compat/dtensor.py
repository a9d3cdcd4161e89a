# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rank's part of a tensor under DTensor placements, the private ``_StridedShard`` included.

FSDP2 over tensor parallelism uses it. Tested with torch 2.11 and 2.13. If the meaning of
``split_factor`` changes, `local_slice` raises, or initialization differs between layouts; tests
compare it with `distribute_tensor`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

StridedShard = _StridedShard
"""A split of a dimension that mesh dimensions to the right already split; not a Shard subclass."""


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, always the same object; a plain tensor unchanged."""
    # The public `DTensor.to_local` adds a node to the autograd graph, or waits and returns a view,
    # so its result is a new object. Optimizers write to the part itself.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor like another one, with another local part; ``part`` for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return part
    # The public `DTensor.from_local` moves the part to the mesh's device, and a copy on the host
    # must stay there.
    return DTensor(part, tensor._spec, requires_grad=False)


def local_slice(
    full: Tensor,
    mesh_shape: tuple[int, ...],
    coordinate: Sequence[int],
    placements: tuple[Placement, ...],
) -> Tensor:
    """Cut the part of a tensor that one rank holds.

    Uneven splits follow torch.chunk, so later ranks get less or nothing. A placement that defines
    no slice (Partial, or an unsupported stride) raises a `RuntimeError`.
    """
    # Not torch's `_compute_local_shape_and_global_offset`: it cuts 9 rows on 4 x 2 ranks otherwise
    # than FSDP2 does.
    for mesh_dim in split_order(placements):
        placement: Any = placements[mesh_dim]
        dim: int = placement.dim
        if isinstance(placement, _StridedShard):
            right = zip(mesh_shape[mesh_dim + 1 :], placements[mesh_dim + 1 :], strict=True)
            splits = math.prod(size for size, other in right if getattr(other, "dim", None) == dim)
            if splits != placement.split_factor:
                want = f"a parameter cannot be initialized as {placements} on {mesh_shape}"
                raise RuntimeError(want)
        chunk = -(-full.shape[dim] // mesh_shape[mesh_dim])
        start = min(chunk * coordinate[mesh_dim], full.shape[dim])
        full = full.narrow(dim, start, min(chunk, full.shape[dim] - start))
    if any(p.is_partial() for p in placements):
        raise RuntimeError(f"a parameter cannot be initialized as {placements}")
    return full


def split_order(placements: Sequence[Any]) -> list[int]:
    """Return the mesh dimensions that split a tensor, in the order in which they split it.

    FSDP2's splits of what is already split to the right, _StridedShard, come last, right to left.
    """
    strided = [i for i, p in enumerate(placements) if isinstance(p, _StridedShard)]
    plain = [i for i, p in enumerate(placements) if isinstance(p, Shard) and i not in strided]
    return [*plain, *reversed(strided)]


def shard_dims(parameter: Tensor, dim: int, order: Iterable[str]) -> tuple[int, ...]:
    """Return which mesh dimensions split a tensor dimension, by index in ``order``."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    splits = {
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim
    }
    return tuple(index for index, name in enumerate(order) if name in splits)


def wrap_like(
    parameter: Tensor, part: Tensor, size: tuple[int, ...], dims: Mapping[int, int]
) -> Tensor:
    """Wrap a rank's part, without a copy, as a DTensor that is sharded like a parameter.

    `dims` maps a dimension of the parameter to that of the result, of global `size`.
    """
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        [_moved(placement, dims) for placement in parameter.placements],
        run_check=False,
        shape=torch.Size(size),
        stride=tuple(Tensor.new_empty(part, size, device="meta").stride()),
    )


def own_part(parameter: Tensor, full: Tensor, dims: Mapping[int, int]) -> Tensor:
    """Return this rank's slice of a full tensor; arguments as in `wrap_like`."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placements = tuple(_moved(placement, dims) for placement in parameter.placements)
    return local_slice(full, tuple(mesh.shape), coordinate, placements)


def _moved(placement: Placement, dims: Mapping[int, int]) -> Placement:
    if not isinstance(placement, Shard | _StridedShard) or placement.dim not in dims:
        return Replicate()
    dim = dims[placement.dim]
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)
