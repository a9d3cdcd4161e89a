# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one TSR-Adam step in closed form, from the paper.

A step without refresh sums cores over each mesh dimension that splits a matrix and over the
replicas, one call per bucket, and dense gradients over the replicas. A refresh adds the sketches Y,
Z and B, what their QR gathers, and checksums, in rounds of matrices that are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Literal

from torchtitan_lr.costs.messages import Traffic, merge

if TYPE_CHECKING:
    from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings

Axis = Literal["rows", "columns"]

BUCKET = 2**26  # elements of a bucket of dense gradients, and of what a refresh holds at a time


@dataclass(frozen=True)
class TSRMatrix:
    """A compressed matrix and its split, transposed if it is projected transposed."""

    plan: MatrixPlan  # sides m and n, rank r, width k, and iterations q of the matrix
    rows: tuple[str, ...] = ()  # mesh dimensions that split the rows
    columns: tuple[str, ...] = ()  # mesh dimensions that split the columns

    @property
    def kind(self) -> object:
        """What matrices that the optimizer stacks have in common."""
        plan = self.plan
        shape = (plan.rows, plan.columns, plan.rank, plan.power_iterations, plan.transposed)
        return shape, self.rows, self.columns


@dataclass(frozen=True)
class TSRMesh:
    """The mesh of a run."""

    sharding: Mapping[str, int]  # ranks by mesh dimension that splits parameters, in order
    replicas: int = 1  # ranks with equal parameters

    def refresh_elements(self, matrix: TSRMatrix) -> tuple[int, int]:
        """Return what a refresh sums over the replicas: as dense gradients, and as sketches.

        A sketch of width k costs (1 + q)(m + n)k: Y (m, k) and B (k, n), and for each power
        iteration Z (n, k) and Y again. ``auto`` sends the gradient if that is not more.
        """
        plan, block = matrix.plan, self.block(matrix)
        sketches = (1 + plan.power_iterations) * sum(block) * plan.width
        cheaper = plan.refresh == "auto" and prod(block) <= sketches
        dense = plan.refresh == "dense" or cheaper
        return (prod(block), 0) if dense else (0, sketches)

    def gathered(self, matrix: TSRMatrix, axis: Axis) -> dict[str, int]:
        """Return what the QR factorization of a sketch gathers, by the dimensions that split it.

        Each rank sends its rows of the sketch, or its triangle (k, k), whichever is less.
        """
        k = matrix.plan.width
        length = self.block(matrix)[0 if axis == "rows" else 1]
        elements = {}
        for dim, size in self.sharding.items():
            if dim in getattr(matrix, axis):
                length = size * min(length, k)
                elements[dim] = length * k
        return elements

    def held(self, matrix: TSRMatrix) -> int:
        """Return the elements of a refresh's sketches, (m, k) and (n, k), and its gather."""
        gathers = (
            *self.gathered(matrix, "rows").values(),
            *self.gathered(matrix, "columns").values(),
        )
        return sum(self.block(matrix)) * matrix.plan.width + max(gathers, default=0)

    def block(self, matrix: TSRMatrix) -> tuple[int, int]:
        """Return the rows and columns of a matrix's largest block, each rounded up."""
        rows, columns = prod(self.ranks(matrix.rows)), prod(self.ranks(matrix.columns))
        return ceil(matrix.plan.rows / rows), ceil(matrix.plan.columns / columns)

    def ranks(self, dims: Collection[str]) -> list[int]:
        """Return the sizes of some mesh dimensions, in the order of the mesh."""
        return [size for dim, size in self.sharding.items() if dim in dims]

    def over_replicas(self, role: str, elements: int) -> list[Traffic]:
        """Return the sum of so many elements over the replicas, if there are any."""
        sends = self.replicas > 1 and elements > 0
        return [_row("all_reduce", role, elements, "dp_replicate")] if sends else []


def tsr_traffic(
    matrices: Sequence[TSRMatrix],
    refreshing: Collection[int],
    dense: Sequence[int],
    mesh: TSRMesh,
    settings: TSRSettings,
) -> list[Traffic]:
    """Return the optimizer's collectives in one step, on the rank with the largest blocks.

    `matrices`, and the elements of a rank's part of all others, `dense`, are in the order of
    backward: the last module first.
    """
    plain = [m for i, m in enumerate(matrices) if i not in refreshing]
    # The optimizer stacks matrices that are alike, in the model's order.
    kinds = list(dict.fromkeys(m.kind for m in reversed(matrices)))
    fresh = [matrices[i] for i in sorted(refreshing, reverse=True)]
    fresh.sort(key=lambda m: kinds.index(m.kind))
    # Cores, r×r or r×n, are summed over every dimension that a projection contracts.
    sizes = [m.plan.rank * (m.plan.rank if m.plan.two_sided else mesh.block(m)[1]) for m in plain]
    contracted = [m.rows + (m.columns if m.plan.two_sided else ()) for m in plain]
    rows: list[Traffic] = []
    for bucket in _buckets(sizes, ceil(sum(sizes) / settings.overlap_buckets)):
        for dim in mesh.sharding:
            if summed := [i for i in bucket if dim in contracted[i]]:
                rows.append(_row("all_reduce", "core", sum(sizes[i] for i in summed), dim))
        rows += mesh.over_replicas("core", sum(sizes[i] for i in bucket))
    whole = [*dense, *filter(None, (mesh.refresh_elements(m)[0] for m in fresh))]
    most = min(BUCKET, ceil(sum(whole) / settings.overlap_buckets))
    for bucket in _buckets(whole, most):
        rows += mesh.over_replicas("gradient", sum(whole[i] for i in bucket))
    for kind in kinds:
        alike = [m for m in fresh if m.kind == kind]
        for bucket in _buckets([mesh.held(m) for m in alike], BUCKET):
            rows += _refresh([alike[i] for i in bucket], mesh, settings.moments == "rotate")
    return merge(rows)


def _refresh(fresh: Sequence[TSRMatrix], mesh: TSRMesh, rotates: bool) -> list[Traffic]:
    """Return one round: the sums Y, (Z, Y)·q, B with a QR after each, signs, checksums.

    Signs come from the sketch and then, for each projected side, from the earlier bases.
    """
    rows: list[Traffic] = []
    axes: list[Axis] = ["columns", *(("rows", "columns") * fresh[0].plan.power_iterations), "rows"]
    for axis in axes:
        # Y and Z are summed over one axis and have the length of the other axis.
        side = 0 if axis == "columns" else 1
        other: Axis = "rows" if axis == "columns" else "columns"
        sketches = [mesh.block(m)[side] * m.plan.width for m in fresh]
        rows += _sum(fresh, axis, sketches, mesh)
        pairs = zip(fresh, sketches, strict=True)
        sent = sum(size for m, size in pairs if mesh.refresh_elements(m)[1])
        rows += mesh.over_replicas("sketch", sent)
        gathered: Counter[str] = Counter()
        for m in fresh:
            gathered.update(mesh.gathered(m, other))
        rows += [_row("all_gather", "sketch", n, dim) for dim, n in gathered.items()]
    both = [m for m in fresh if m.plan.two_sided]
    sums: list[tuple[Sequence[TSRMatrix], Axis, int]] = [
        *((fresh, "columns", 1), (fresh, "rows", 1), (both, "columns", 1)),
        *(((fresh, "rows", 2), (both, "columns", 2)) if rotates else ()),
    ]
    for matrices, axis, power in sums:
        rows += _sum(matrices, axis, [m.plan.rank**power for m in matrices], mesh)
    return [*rows, *mesh.over_replicas("checksum", 2 * len(fresh))]


def _sum(
    matrices: Sequence[TSRMatrix], axis: Axis, elements: Sequence[int], mesh: TSRMesh
) -> list[Traffic]:
    rows = []
    for dim in mesh.sharding:
        pairs = zip(matrices, elements, strict=True)
        if sizes := [n for m, n in pairs if dim in getattr(m, axis)]:
            rows.append(_row("all_reduce", "sketch", sum(sizes), dim))
    return rows


def _buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of consecutive sizes of at most ``limit`` together, or of a larger one."""
    result: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not result or filled + size > limit:
            result.append([])
            filled = 0
        result[-1].append(index)
        filled += size
    return result


def _row(op: str, role: str, elements: int, dim: str) -> Traffic:
    return Traffic("step", "optimizer", op, role, 1, elements, dim)
