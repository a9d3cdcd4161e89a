# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which ranks hold which part of a matrix, and the messages of a spectral step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lr.compat.dtensor import local_part, local_slice
from torchtitan_lr.compat.process_groups import all_gather, joint_group, reduce_scatter

Split = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions of more than one rank that split a side of a matrix."""

BATCH_ELEMENTS = 2**24
"""Elements of the (r, r) matrices that are iterated together: five times that is in memory."""


class View:
    """A parameter, plain or a DTensor, seen as (r, n): its dimension ``row_dim`` is r."""

    def __init__(self, parameter: Tensor, row_dim: int) -> None:
        self.parameter, self.row_dim = parameter, row_dim
        self.r = parameter.shape[row_dim]
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        # What splits r, and what splits n; None if nothing does.
        self.rows, self.columns = (_split(parameter, dim) for dim in (row_dim, 1 - row_dim))

    def exact_part(self) -> Tensor:
        """Return this rank's part, in fp32 or wider; of such a parameter the part itself."""
        return local_part(self.parameter).to(self.dtype)

    def oriented(self, part: Tensor) -> Tensor:
        """Return a view of a part with r as its rows."""
        return part if self.row_dim == 0 else part.mT

    def rows_of(self, rank: int) -> Tensor:
        """Return which of the r rows a rank of the mesh holds."""
        assert isinstance(self.parameter, DTensor) and self.rows is not None
        mesh, dims = self.rows
        placements = tuple(
            placement if mesh_dim in dims else Replicate()
            for mesh_dim, placement in enumerate(self.parameter.placements)
        )
        coordinate: list[int] = (mesh.mesh == rank).nonzero()[0].tolist()
        numbers = torch.arange(self.r).unsqueeze(1 - self.row_dim)
        return local_slice(numbers, tuple(mesh.shape), coordinate, placements).flatten()


def _split(parameter: Tensor, dim: int) -> Split | None:
    """Return what splits a dimension of a parameter."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, found = parameter.device_mesh, []
    for mesh_dim, placement in enumerate(cast(tuple[Any, ...], parameter.placements)):
        if mesh.size(mesh_dim) > 1 and not placement.is_replicate() and placement.dim == dim:
            found.append(mesh_dim)
    return (mesh, tuple(found)) if found else None


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


class GramGroups:
    """The process groups of the messages for some matrices.

    Every rank builds them, in the same order.
    """

    def __init__(self, views: Iterable[View]) -> None:
        self.by_split: dict[Split, dist.ProcessGroup] = {}
        # Of each row its place among the ranks of a group and among the rank's rows, and the
        # largest rank's rows: by split, placements, kind of matrix and r.
        self._places: dict[Any, tuple[tuple[Tensor, Tensor], int]] = {}
        for view in views:
            for split in (view.rows, view.columns):
                if split is not None and split not in self.by_split:
                    self.by_split[split] = joint_group(*split)

    def by_name(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups by the names of their mesh dimensions, such as ``fsdp_tp``."""
        names = {}
        for (mesh, dims), group in self.by_split.items():
            assert mesh.mesh_dim_names is not None
            names["_".join(mesh.mesh_dim_names[dim] for dim in dims)] = group
        return names

    def sum_terms(self, terms: Mapping[Seen, Tensor], rows: bool = False) -> dict[Seen, Tensor]:
        """Sum vectors over the ranks that hold other columns, or rows, of the same matrix.

        All vectors of one dtype, and of matrices that the same ranks split, are one all-reduce.
        """
        messages: dict[Any, list[Seen]] = defaultdict(list)
        for view, term in terms.items():
            messages[view.rows if rows else view.columns, term.dtype].append(view)
        sums: dict[Seen, Tensor] = {}
        for (split, _), views in messages.items():
            own = [terms[view] for view in views]
            if split is not None:
                message = torch.cat(own)
                dist.all_reduce(message, group=self.by_split[split])
                own = list(message.split([term.numel() for term in own]))
            sums |= zip(views, own, strict=True)
        return sums

    def gather_rows(self, parts: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Gather all r rows of a rank's columns from the ranks that split r, as (r, n).

        All parts of one dtype, and of matrices that the same ranks split, are one all-gather. Each
        part has the orientation of its parameter.
        """
        messages: dict[Any, list[Seen]] = defaultdict(list)
        whole: dict[Seen, Tensor] = {}
        for view, part in parts.items():
            if view.rows is None:
                whole[view] = view.oriented(part)
            else:
                messages[view.rows, part.dtype].append(view)
        for (split, _), views in messages.items():
            group = self.by_split[split]
            own = []
            for view in views:
                _, most = self._places_of(view)
                part = parts[view]
                lacking = most - part.shape[view.row_dim]  # every rank sends as many
                pads = (0, 0, 0, lacking) if view.row_dim == 0 else (0, lacking)
                own.append(torch.nn.functional.pad(part, pads) if lacking else part)
            message = torch.cat([part.reshape(-1) for part in own])
            everyone = message.new_empty(group.size(), message.numel())
            all_gather(everyone.view(-1), message, group=group)
            pieces = everyone.split([part.numel() for part in own], dim=1)
            for view, part, piece in zip(views, own, pieces, strict=True):
                # Of (ranks, rows, n), or (n, ranks, rows), all r rows: one copy.
                by_rank = piece.view(-1, *part.shape).movedim(0, view.row_dim)
                places, _ = self._places_of(view)
                found = by_rank[places] if view.row_dim == 0 else by_rank[:, places[0], places[1]]
                whole[view] = view.oriented(found)
        return whole

    def _places_of(self, view: View) -> tuple[tuple[Tensor, Tensor], int]:
        """Return which rank holds each row, and where; and the rows of the largest part."""
        assert isinstance(view.parameter, DTensor) and view.rows is not None
        key = view.rows, view.parameter.placements, view.row_dim, view.r
        if key not in self._places:
            held = [view.rows_of(n) for n in dist.get_process_group_ranks(self.by_split[view.rows])]
            places = torch.empty(2, view.r, dtype=torch.int64)
            for rank, rows in enumerate(held):
                places[0, rows], places[1, rows] = rank, torch.arange(len(rows))
            ranks, rows = places.to(local_part(view.parameter).device)
            self._places[key] = (ranks, rows), max(map(len, held))
        return self._places[key]


class Share(Generic[Seen]):
    """Matrices whose Q the ranks of a group share out.

    Each rank has the sums of its own matrices alone, and all ranks get the results of all.
    ``by_rank`` has the matrices of each rank; vectors in equal places have equal lengths. ``equal``
    says that the ranks' terms are equal, and so the sums already.
    """

    def __init__(
        self, group: dist.ProcessGroup, by_rank: Sequence[Sequence[Seen]], equal: bool
    ) -> None:
        self.group, self.by_rank, self.equal = group, by_rank, equal
        self._own = by_rank[group.rank()]

    def reduce(self, terms: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Return the sums of this rank's matrices; each rank has terms of all."""
        if self.equal:
            return {view: terms[view] for view in self._own}
        message = torch.cat([terms[view] for view in chain.from_iterable(self.by_rank)])
        sums = message.new_empty(message.numel() // self.group.size())
        reduce_scatter(sums, message, group=self.group)
        parts = sums.split([terms[view].numel() for view in self._own])
        return dict(zip(self._own, parts, strict=True))

    def gather(self, own: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Return the vectors of all ranks; each has those of its own matrices."""
        message = torch.cat([own[view] for view in self._own])
        everyone = message.new_empty(self.group.size(), message.numel())
        all_gather(everyone.view(-1), message, group=self.group)
        sizes = [own[view].numel() for view in self._own]
        found: dict[Seen, Tensor] = {}
        for views, row in zip(self.by_rank, everyone, strict=True):
            found |= zip(views, row.split(sizes), strict=True)
        return found
