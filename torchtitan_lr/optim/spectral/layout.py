# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which ranks hold which part of a matrix, and the messages of a spectral step.

Nothing here knows the rules: the functions take tensors and layouts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lr.compat.dtensor import local_part, local_slice, split_order
from torchtitan_lr.compat.process_groups import all_gather, joint_group, reduce_scatter

Key = TypeVar("Key")

Split = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions that split a side of a matrix."""

BATCH_ELEMENTS = 2**24
"""Elements of the (r, r) matrices that are iterated together: five times that is in memory."""


@dataclass(frozen=True)
class GramLayout:
    """How ranks split a matrix, seen as (r, n)."""

    row_dim: int
    """The dimension of the parameter that is r."""
    mesh: DeviceMesh | None = None
    """None for a plain tensor."""
    placements: tuple[Any, ...] = ()
    """By mesh dimension."""
    rows: tuple[int, ...] = ()
    """Mesh dimensions of more than one rank that split r."""
    columns: tuple[int, ...] = ()
    """Mesh dimensions of more than one rank that split n."""

    @classmethod
    def of(cls, parameter: Tensor, row_dim: int) -> "GramLayout":
        """Read the layout of a parameter."""
        if not isinstance(parameter, DTensor):
            return cls(row_dim)
        mesh, placements = parameter.device_mesh, parameter.placements
        split: dict[int, list[int]] = {0: [], 1: []}  # by dimension of the parameter
        for mesh_dim, placement in enumerate(cast(tuple[Any, ...], placements)):
            if mesh.size(mesh_dim) > 1 and not placement.is_replicate():
                split[placement.dim].append(mesh_dim)
        rows, columns = tuple(split[row_dim]), tuple(split[1 - row_dim])
        return cls(row_dim, mesh, tuple(placements), rows, columns)

    @property
    def split_of_work(self) -> tuple[Split | None, bool]:
        """Which ranks share the work on Q, and whether each has the Gram matrix without a sum.

        They are those that split n, or else r.
        """
        dims = self.columns or self.rows
        split = (self.mesh, dims) if self.mesh is not None and dims else None
        return split, not self.columns

    def splits_evenly(self, r: int) -> bool:
        """Return whether all ranks have equally many of r rows."""
        assert self.mesh is not None
        return r % prod(self.mesh.size(mesh_dim) for mesh_dim in self.rows) == 0

    def joined(self, pieces: Tensor, like: Tensor) -> Tensor:
        """Put this rank's columns together from equal pieces of the ranks that split r: one copy.

        The flat pieces (N, ...) are in the order of the ranks' coordinates in the mesh; ``like`` is
        this rank's own.
        """
        assert self.mesh is not None
        sizes = [self.mesh.size(mesh_dim) for mesh_dim in self.rows]
        by_coordinate = pieces.view(*sizes, *like.shape)
        order = [self.rows.index(dim) for dim in split_order(self.placements) if dim in self.rows]
        own_rows, columns = len(sizes) + self.row_dim, len(sizes) + 1 - self.row_dim
        if self.row_dim == 0:
            return by_coordinate.permute(*order, own_rows, columns).flatten(0, -2)  # (r, n)
        return by_coordinate.permute(columns, *order, own_rows).flatten(1)  # (n, r)

    def whole_rows(self, pieces: Mapping[int, Tensor], like: Tensor, r: int) -> Tensor:
        """Put this rank's columns together from flat, padded pieces of the ranks that split r."""
        assert self.mesh is not None
        shape = list(like.shape)
        shape[self.row_dim] = r
        whole = like.new_empty(shape)
        for rank, piece in pieces.items():
            part = self.part_of(rank, whole)
            part.copy_(piece[: part.numel()].view(part.shape))
        return whole

    def padded(self, part: Tensor, r: int) -> Tensor:
        """Return a rank's part as a flat vector of the length of the largest part."""
        assert self.mesh is not None
        if self.splits_evenly(r):
            return part.reshape(-1)
        rows = r
        for mesh_dim in self.rows:
            rows = -(-rows // self.mesh.size(mesh_dim))
        flat = part.new_zeros(rows * part.shape[1 - self.row_dim])
        flat[: part.numel()] = part.reshape(-1)
        return flat

    def part_of(self, rank: int, whole: Tensor) -> Tensor:
        """Return the view of a rank's rows in a part of the parameter with all rows."""
        assert self.mesh is not None
        placements = tuple(
            placement if mesh_dim in self.rows else Replicate()
            for mesh_dim, placement in enumerate(self.placements)
        )
        coordinate = _coordinate(self.mesh, rank)
        return local_slice(whole, tuple(self.mesh.shape), coordinate, placements)


class View:
    """A parameter, plain or a DTensor, seen as (r, n): its dimension ``row_dim`` is r."""

    def __init__(self, parameter: Tensor, row_dim: int) -> None:
        self.parameter, self.row_dim = parameter, row_dim
        self.r = parameter.shape[row_dim]
        self.layout = GramLayout.of(parameter, row_dim)
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)

    def exact_part(self) -> Tensor:
        """Return this rank's part, in fp32 or wider; of such a parameter the part itself."""
        return local_part(self.parameter).to(self.dtype)

    def oriented(self, part: Tensor) -> Tensor:
        """Return a view of a part with r as its rows."""
        return part if self.row_dim == 0 else part.mT


Seen = TypeVar("Seen", bound=View)


def batches(views: Iterable[Seen]) -> Iterator[list[Seen]]:
    """Yield matrices of equal shapes, whose (r, r) matrices are worked on together."""
    alike: dict[Any, list[Seen]] = defaultdict(list)
    for view in views:
        alike[view.r, max(view.parameter.shape), view.dtype].append(view)
    for (r, *_), same in alike.items():
        size = max(1, BATCH_ELEMENTS // r**2)
        for start in range(0, len(same), size):
            yield same[start : start + size]


@cache
def _coordinate(mesh: DeviceMesh, rank: int) -> list[int]:
    coordinate: list[int] = (mesh.mesh == rank).nonzero()[0].tolist()
    return coordinate


class GramGroups:
    """The process groups of the messages for matrices of some layouts.

    Every rank builds them, in the same order.
    """

    def __init__(self, layouts: Iterable[GramLayout]) -> None:
        self.by_split: dict[Split, dist.ProcessGroup] = {}
        self._in_order: dict[Split, bool] = {}
        for layout in layouts:
            for dims in (layout.rows, layout.columns):
                if dims and (layout.mesh, dims) not in self.by_split:
                    assert layout.mesh is not None
                    group = joint_group(layout.mesh, dims)
                    self.by_split[layout.mesh, dims] = group
                    # Torch sorts a group's ranks; a mesh may have them in any order.
                    ranks = dist.get_process_group_ranks(group)
                    places = [_coordinate(layout.mesh, rank) for rank in ranks]
                    self._in_order[layout.mesh, dims] = places == sorted(places)

    def by_name(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups by the names of their mesh dimensions, such as ``fsdp_tp``."""
        names = {}
        for (mesh, dims), group in self.by_split.items():
            assert mesh.mesh_dim_names is not None
            names["_".join(mesh.mesh_dim_names[dim] for dim in dims)] = group
        return names

    def sum_terms(
        self, terms: Mapping[Key, tuple[GramLayout, Tensor]], rows: bool = False
    ) -> dict[Key, Tensor]:
        """Sum vectors over the ranks that hold other columns, or rows, of the same matrix.

        All vectors of one dtype, and of matrices that the same ranks split, are one all-reduce.
        ``terms`` has the layout of each matrix and this rank's term.
        """
        messages: dict[Any, list[Key]] = defaultdict(list)
        for key, (layout, term) in terms.items():
            dims = layout.rows if rows else layout.columns
            messages[layout.mesh, dims, term.dtype].append(key)
        sums: dict[Key, Tensor] = {}
        for (mesh, dims, _), keys in messages.items():
            own = [terms[key][1] for key in keys]
            if dims:
                message = torch.cat(own)
                dist.all_reduce(message, group=self.by_split[mesh, dims])
                own = list(message.split([term.numel() for term in own]))
            sums |= dict(zip(keys, own, strict=True))
        return sums

    def gather_rows(self, parts: Mapping[Key, tuple[GramLayout, Tensor, int]]) -> dict[Key, Tensor]:
        """Gather all r rows of a rank's columns from the ranks that split r.

        All parts of one dtype, and of matrices that the same ranks split, are one all-gather.
        Parts with all rows are returned as they are. ``parts`` has the layout of each matrix, this
        rank's part and r.
        """
        messages: dict[Any, list[Key]] = defaultdict(list)
        whole: dict[Key, Tensor] = {}
        for key, (layout, part, _) in parts.items():
            if layout.rows:
                messages[layout.mesh, layout.rows, part.dtype].append(key)
            else:
                whole[key] = part
        for (mesh, dims, _), keys in messages.items():
            group = self.by_split[mesh, dims]
            own = []
            for key in keys:
                layout, part, r = parts[key]
                own.append(layout.padded(part, r))
            message = torch.cat(own)
            everyone = message.new_empty(group.size(), message.numel())
            all_gather(everyone.view(-1), message, group=group)
            ranks = dist.get_process_group_ranks(group)
            pieces = everyone.split([piece.numel() for piece in own], dim=1)
            for key, piece in zip(keys, pieces, strict=True):
                layout, part, r = parts[key]
                if self._in_order[mesh, dims] and layout.splits_evenly(r):
                    whole[key] = layout.joined(piece, part)
                else:
                    by_rank = dict(zip(ranks, piece, strict=True))
                    whole[key] = layout.whole_rows(by_rank, part, r)
        return whole


class Share(Generic[Key]):
    """Matrices whose sums ranks need for their own ones alone, and whose results all ranks need.

    ``by_rank`` has the keys of each rank's; vectors in equal places have equal lengths. ``equal``
    says that the ranks' terms are equal, and so the sums already.
    """

    def __init__(
        self, group: dist.ProcessGroup, by_rank: Sequence[Sequence[Key]], equal: bool
    ) -> None:
        self.group, self.by_rank, self.equal = group, by_rank, equal
        self._own = by_rank[group.rank()]

    def reduce(self, terms: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return the sums of this rank's matrices; each rank has terms of all."""
        if self.equal:
            return {key: terms[key] for key in self._own}
        message = torch.cat([terms[key] for key in chain.from_iterable(self.by_rank)])
        sums = message.new_empty(message.numel() // self.group.size())
        reduce_scatter(sums, message, group=self.group)
        parts = sums.split([terms[key].numel() for key in self._own])
        return dict(zip(self._own, parts, strict=True))

    def gather(self, own: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return the vectors of all ranks; each has those of its own matrices."""
        message = torch.cat([own[key] for key in self._own])
        everyone = message.new_empty(self.group.size(), message.numel())
        all_gather(everyone.view(-1), message, group=self.group)
        sizes = [own[key].numel() for key in self._own]
        found: dict[Key, Tensor] = {}
        for keys, row in zip(self.by_rank, everyone, strict=True):
            found |= zip(keys, row.split(sizes), strict=True)
        return found
