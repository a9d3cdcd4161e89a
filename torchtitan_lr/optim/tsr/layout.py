# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sharding of a parameter, and of tensors derived from it, over the mesh."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lr.compat.dtensor import StridedShard, local_slice


@dataclass(frozen=True)
class Layout:
    """The mesh dimensions that split a matrix.

    Args:
        rows: Indices of the dimensions that split its rows, in the run's common order.
        columns: The same for its columns.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


def mesh_groups(parameters: Iterable[Tensor]) -> dict[str, dist.ProcessGroup]:
    """Return the parameters' mesh dimensions of more than one rank, with their groups.

    Returns:
        Process group by dimension name, in the mesh's order: the run's common order.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim, name in enumerate(mesh.mesh_dim_names or ()):
                if mesh.size(dim) > 1:
                    groups.setdefault(name, mesh.get_group(dim))
    return groups


def shard_dims(parameter: Tensor, dim: int, order: Iterable[str]) -> tuple[int, ...]:
    """Return which mesh dimensions split a tensor dimension.

    Args:
        parameter: A plain tensor (not sharded) or a DTensor.
        dim: The tensor dimension.
        order: Names of the run's mesh dimensions.
    """
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    splits = {
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim
    }
    return tuple(index for index, name in enumerate(order) if name in splits)


def derived(
    parameter: Tensor, part: Tensor, size: tuple[int, ...], dims: Mapping[int, int]
) -> Tensor:
    """Wrap a rank's part as a DTensor that is sharded like a parameter.

    Args:
        parameter: The parameter.
        part: This rank's part; the result shares its memory.
        size: Global size of the derived tensor.
        dims: Maps a dimension of the parameter to the dimension of the result that follows it.
    """
    if not isinstance(parameter, DTensor):
        return part
    placements = derived_placements(parameter, dims)
    stride = tuple(Tensor.new_empty(part, size, device="meta").stride())
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(size),
        stride=stride,
    )


def own_part(parameter: Tensor, full: Tensor, dims: Mapping[int, int]) -> Tensor:
    """Return this rank's slice of a full tensor; arguments as in `derived`."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return local_slice(full, tuple(mesh.shape), coordinate, derived_placements(parameter, dims))


def derived_placements(parameter: DTensor, dims: Mapping[int, int]) -> tuple[Placement, ...]:
    """Return the placements of a tensor whose dimensions follow a parameter's."""
    return tuple(_move(placement, dims) for placement in parameter.placements)


def _move(placement: Placement, dims: Mapping[int, int]) -> Placement:
    if not isinstance(placement, Shard | StridedShard) or placement.dim not in dims:
        return Replicate()
    dim = dims[placement.dim]
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)
