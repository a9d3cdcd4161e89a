# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which ranks hold which part of a matrix, and the messages of a spectral step."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lr.compat.dtensor import local_part, local_slice
from torchtitan_lr.compat.process_groups import gathered, joint_group, reduce_scatter
from torchtitan_lr.optim.own_optimizer import alike

Split = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions of more than one rank that split a side of a matrix."""

BATCH_ELEMENTS = 2**24
"""Elements of the (r, r) matrices that are iterated together: five times that is in memory, eleven
times where products are split."""


class View:
    """A parameter, plain or a DTensor, seen as (r, n): its dimension ``row_dim`` is r."""

    def __init__(self, parameter: Tensor, row_dim: int) -> None:
        self.parameter, self.row_dim = parameter, row_dim
        self.r = parameter.shape[row_dim]
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        # The ranks that split r, and those that split n; None if none do.
        self.row_split = _split(parameter, row_dim)
        self.column_split = _split(parameter, 1 - row_dim)

    def exact_part(self) -> Tensor:
        """Return this rank's part, in fp32 or wider; of such a parameter the part itself."""
        return local_part(self.parameter).to(self.dtype)

    def oriented(self, part: Tensor) -> Tensor:
        """Return a view of a part with r as its rows."""
        return part if self.row_dim == 0 else part.mT

    def rows_of(self, rank: int) -> Tensor:
        """Return which of the r rows a rank of the mesh holds."""
        assert isinstance(self.parameter, DTensor) and self.row_split is not None
        mesh, dims = self.row_split
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
    for same in alike(views, lambda view: (view.r, max(view.parameter.shape), view.dtype)):
        size = max(1, BATCH_ELEMENTS // same[0].r ** 2)
        for start in range(0, len(same), size):
            yield same[start : start + size]


class RowPlaces(NamedTuple):
    """Where the r rows of a matrix are, whose rows a process group splits."""

    ranks: Tensor  # of each row the rank that holds it (r,)
    places: Tensor  # of each row its place among that rank's rows (r,)
    most: int  # the rows of the rank that holds most


class GramGroups:
    """The process groups of the messages for some matrices.

    Every rank builds them, in the same order.
    """

    def __init__(self, views: Iterable[View]) -> None:
        self.by_split: dict[Split, dist.ProcessGroup] = {}
        self._row_places: dict[Any, RowPlaces] = {}  # by split, placements, orientation and r
        for view in views:
            for split in (view.row_split, view.column_split):
                if split is not None and split not in self.by_split:
                    self.by_split[split] = joint_group(*split)

    def by_name(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups by the names of their mesh dimensions, such as ``fsdp_tp``."""
        names = {}
        for (mesh, dims), group in self.by_split.items():
            assert mesh.mesh_dim_names is not None
            names["_".join(mesh.mesh_dim_names[dim] for dim in dims)] = group
        return names

    def sum_terms(
        self, terms: Mapping[Seen, Tensor], over_rows: bool = False
    ) -> dict[Seen, Tensor]:
        """Sum vectors over the ranks that hold other columns of the same matrix, or other rows.

        All vectors of one dtype, and of matrices that the same ranks split, are one all-reduce.
        """

        def split_of(view: Seen) -> Split | None:
            return view.row_split if over_rows else view.column_split

        sums: dict[Seen, Tensor] = {}
        for views in alike(terms, lambda view: (split_of(view), terms[view].dtype)):
            vectors = [terms[view] for view in views]
            if (split := split_of(views[0])) is not None:
                message = torch.cat(vectors)
                dist.all_reduce(message, group=self.by_split[split])
                vectors = list(message.split([vector.numel() for vector in vectors]))
            sums |= zip(views, vectors, strict=True)
        return sums

    def gather_rows(self, parts: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Return all r rows (r, n) of the columns that this rank holds.

        Each part has the orientation of its parameter. All parts of one dtype, and of matrices
        whose r the same ranks split, are one all-gather.
        """
        whole: dict[Seen, Tensor] = {}
        for views in alike(parts, lambda view: (view.row_split, parts[view].dtype)):
            split = views[0].row_split
            if split is None:  # the part has all rows
                whole |= {view: view.oriented(parts[view]) for view in views}
                continue
            # 1. Every rank sends as many rows of a matrix: those of its largest part.
            padded = [self._padded(view, parts[view]) for view in views]
            # 2. One message of all matrices; those of all ranks are (ranks, elements).
            message = torch.cat([part.reshape(-1) for part in padded])
            messages = gathered(message, self.by_split[split])
            # 3. Of each matrix the parts of all ranks, whose rows are put in their order.
            pieces = messages.split([part.numel() for part in padded], dim=1)
            for view, part, piece in zip(views, padded, pieces, strict=True):
                whole[view] = self._in_order(view, piece.view(-1, *part.shape))
        return whole

    def _padded(self, view: View, part: Tensor) -> Tensor:
        """Lengthen a part to the rows of the largest one."""
        lacking = self._places_of(view).most - part.shape[view.row_dim]
        pads = (0, 0, 0, lacking) if view.row_dim == 0 else (0, lacking)
        return torch.nn.functional.pad(part, pads) if lacking else part

    def _in_order(self, view: View, by_rank: Tensor) -> Tensor:
        """Return the rows (r, n) of padded parts, (ranks, most, n) or (ranks, n, most): a copy."""
        ranks, places, _ = self._places_of(view)
        if view.row_dim == 0:
            return by_rank[ranks, places]
        return by_rank.movedim(0, 1)[:, ranks, places].mT

    def _places_of(self, view: View) -> RowPlaces:
        assert isinstance(view.parameter, DTensor) and view.row_split is not None
        key = view.row_split, view.parameter.placements, view.row_dim, view.r
        if key not in self._row_places:
            members = dist.get_process_group_ranks(self.by_split[view.row_split])
            rows = [view.rows_of(rank) for rank in members]
            found = torch.empty(2, view.r, dtype=torch.int64)
            for number, own in enumerate(rows):
                found[0, own], found[1, own] = number, torch.arange(len(own))
            ranks, places = found.to(local_part(view.parameter).device)
            self._row_places[key] = RowPlaces(ranks, places, max(map(len, rows)))
        return self._row_places[key]


class Division(Generic[Seen]):
    """Linears, tuples of matrices, that the ranks of a process group divide among themselves.

    Each rank gets the sums of its own matrices alone, computes their results, and gets those of the
    other ranks. ``summed`` says that the ranks' terms are equal: they are the sums already.
    """

    def __init__(self, group: dist.ProcessGroup, summed: bool) -> None:
        self.group, self.summed = group, summed
        self.by_rank: list[list[tuple[Seen, ...]]] = [[] for _ in range(group.size())]
        self.own = self.by_rank[group.rank()]

    def deal(self, linears: list[tuple[Seen, ...]]) -> list[tuple[Seen, ...]]:
        """Give each rank as many linears of equal vectors, and return those that are left over."""
        each = len(linears) // len(self.by_rank)
        for rank, own in enumerate(self.by_rank):
            own += linears[rank * each : (rank + 1) * each]
        return linears[len(self.by_rank) * each :]

    def reduce(self, terms: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Return the sums of this rank's matrices, by one reduce-scatter of terms of all."""
        own = list(chain(*self.own))
        if self.summed:
            return {view: terms[view] for view in own}
        # Rank after rank: each has as many matrices of each length.
        message = torch.cat([terms[view] for view in chain(*self._matrices())])
        sums = message.new_empty(message.numel() // self.group.size())
        reduce_scatter(sums, message, group=self.group)
        return dict(zip(own, sums.split([terms[view].numel() for view in own]), strict=True))

    def gather(self, results: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Return the vectors of all ranks' matrices, from those of this rank, by one all-gather."""
        vectors = [results[view] for view in chain(*self.own)]
        sizes = [vector.numel() for vector in vectors]
        messages = gathered(torch.cat(vectors), self.group)  # (ranks, elements)
        found: dict[Seen, Tensor] = {}
        for matrices, message in zip(self._matrices(), messages, strict=True):
            found |= zip(matrices, message.split(sizes), strict=True)
        return found

    def _matrices(self) -> list[list[Seen]]:
        """Return the matrices of each rank, linear after linear."""
        return [list(chain(*linears)) for linears in self.by_rank]
