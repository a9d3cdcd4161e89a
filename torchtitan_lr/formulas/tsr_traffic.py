# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one TSR-Adam step in closed form.

A step without refresh sums cores over each mesh dimension that splits a matrix and over the
replicas, in one call per bucket, and dense gradients over the replicas likewise. A refresh adds the
sketches Y, Z and B (`randomized_svd`), the triangles of the QR factorizations, and checksums, in
rounds shared by the refreshing matrices with equal q. Elements are counted like in the ledger.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import Literal

from torchtitan_lr.formulas.traffic import Traffic, merge

BUCKET_ELEMENTS = 2**26
"""Elements of a bucket of dense gradients, and of the sketches in memory at a time.

Like blocks and buckets, this is stated independently of the optimizer.
"""

Axis = Literal["rows", "columns"]


@dataclass(frozen=True)
class TSRMatrix:
    """A compressed matrix and its split, transposed if it is projected transposed.

    Args:
        rows: m of the whole matrix.
        columns: n.
        rank: r.
        width: k, columns of a sketch.
        row_split: Mesh dimensions that split the rows.
        column_split: Mesh dimensions that split the columns.
        two_sided: Whether the core is r×r (or else r×n).
        power_iterations: q of its refreshes.
    """

    rows: int
    columns: int
    rank: int
    width: int
    row_split: tuple[str, ...] = ()
    column_split: tuple[str, ...] = ()
    two_sided: bool = True
    power_iterations: int = 1

    def split(self, axis: Axis) -> tuple[str, ...]:
        """Return the mesh dimensions that split an axis."""
        return self.row_split if axis == "rows" else self.column_split


@dataclass(frozen=True)
class TSRMesh:
    """The mesh of a run.

    Args:
        sharding: Ranks by mesh dimension that splits parameters, in order.
        replicas: Ranks with equal parameters.
        stages: Pipeline ranks.
    """

    sharding: Mapping[str, int]
    replicas: int = 1
    stages: int = 1

    def block(self, matrix: TSRMatrix) -> tuple[int, int]:
        """Return the rows and columns of a matrix's largest block, each rounded up."""
        rows = prod(self.sharding[dim] for dim in matrix.row_split)
        columns = prod(self.sharding[dim] for dim in matrix.column_split)
        return ceil(matrix.rows / rows), ceil(matrix.columns / columns)


@dataclass(frozen=True)
class TSRStep:
    """Settings that determine the traffic.

    Args:
        refresh: ``auto``, ``sketch`` or ``dense``.
        rotates: Whether moments are rotated into new bases.
        buckets: Number of all-reduces for the cores, and of those for dense gradients.
    """

    refresh: str = "auto"
    rotates: bool = True
    buckets: int = 1


def bucket_runs(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split entries greedily into consecutive buckets of at most ``limit`` elements.

    Args:
        sizes: Elements of each entry; an entry above the limit gets its own bucket.
        limit: Elements of a bucket.
    """
    end_of = list(accumulate(sizes))
    buckets, first = [], 0
    while first < len(sizes):
        before = end_of[first] - sizes[first]
        fitting = bisect_right(end_of, before + limit, lo=first)
        end = max(first + 1, fitting)
        buckets.append(list(range(first, end)))
        first = end
    return buckets


def tsr_traffic(
    matrices: Sequence[TSRMatrix],
    refreshing: Collection[int],
    dense: Sequence[int],
    mesh: TSRMesh,
    step: TSRStep,
) -> list[Traffic]:
    """Return the optimizer's collectives in one step, on the rank with the largest blocks.

    Args:
        matrices: The compressed matrices, in the order of backward: the last module first.
        refreshing: Indices of those that refresh.
        dense: Elements of a rank's part of every other parameter, in the same order.
        mesh: The mesh of the run.
        step: Settings of the step.

    Returns:
        Rows of the scope ``step`` and the pass ``optimizer``, with the roles ``core``,
        ``gradient``, ``sketch``, ``norm`` (fp64) and ``checksum`` (int64).
    """
    plain = [m for i, m in enumerate(matrices) if i not in refreshing]
    fresh = [matrices[i] for i in sorted(refreshing)]
    rows = _cores(plain, mesh, step)
    whole = [*dense, *(prod(mesh.block(m)) for m in fresh if _is_dense(m, mesh, step))]
    most = min(BUCKET_ELEMENTS, ceil(sum(whole) / step.buckets))
    for bucket in bucket_runs(whole, most):
        rows += _over_replicas("gradient", sum(whole[i] for i in bucket), mesh)
    sizes = [sum(mesh.block(m)) * m.width for m in fresh]
    for bucket in bucket_runs(sizes, BUCKET_ELEMENTS):
        for q in {fresh[i].power_iterations for i in bucket}:
            alike = [fresh[i] for i in bucket if fresh[i].power_iterations == q]
            rows += _refresh(alike, q, mesh, step)
    rows += [_row("all_reduce", "norm", 1, dim) for dim in mesh.sharding]
    if mesh.stages > 1:
        rows.append(_row("all_reduce", "norm", 1, "pp"))
    return merge(rows)


def _cores(plain: Sequence[TSRMatrix], mesh: TSRMesh, step: TSRStep) -> list[Traffic]:
    """Return the sums of cores, r×r or r×n, over every dimension that a projection contracts."""
    sizes = [m.rank * (m.rank if m.two_sided else mesh.block(m)[1]) for m in plain]
    contracted = [m.row_split + (m.column_split if m.two_sided else ()) for m in plain]
    rows: list[Traffic] = []
    for bucket in bucket_runs(sizes, ceil(sum(sizes) / step.buckets)):
        for dim in mesh.sharding:
            summed = [i for i in bucket if dim in contracted[i]]
            if summed:
                rows.append(_row("all_reduce", "core", sum(sizes[i] for i in summed), dim))
        rows += _over_replicas("core", sum(sizes[i] for i in bucket), mesh)
    return rows


def _refresh(fresh: Sequence[TSRMatrix], q: int, mesh: TSRMesh, step: TSRStep) -> list[Traffic]:
    """Return one round: the sums Y, (Z, Y)·q, B with a QR after each, signs, checksums.

    Signs come from the sketch and then, for each projected side, from the earlier bases.
    """
    rows: list[Traffic] = []
    axes: list[Axis] = ["columns", *(("rows", "columns") * q), "rows"]
    for axis in axes:
        # Y and Z are summed over one axis and have the length of the other.
        lengths = [mesh.block(m)[0 if axis == "columns" else 1] for m in fresh]
        sketches = [n * m.width for n, m in zip(lengths, fresh, strict=True)]
        rows += _sum(fresh, axis, sketches, mesh)
        pairs = zip(fresh, sketches, strict=True)
        sent = sum(size for m, size in pairs if not _is_dense(m, mesh, step))
        rows += _over_replicas("sketch", sent, mesh)
        for dim, ranks in mesh.sharding.items():
            split = [m for m in fresh if dim in m.split("rows" if axis == "columns" else "columns")]
            if split:
                triangles = sum(ranks * m.width**2 for m in split)
                rows.append(_row("all_gather", "sketch", triangles, dim))
    both = [m for m in fresh if m.two_sided]
    sums: list[tuple[Sequence[TSRMatrix], Axis, int]] = [
        *((fresh, "columns", 1), (fresh, "rows", 1), (both, "columns", 1)),
        *(((fresh, "rows", 2), (both, "columns", 2)) if step.rotates else ()),
    ]
    for matrices, axis, power in sums:
        rows += _sum(matrices, axis, [m.rank**power for m in matrices], mesh)
    return [*rows, *_over_replicas("checksum", 2 * len(fresh), mesh)]


def _sum(
    matrices: Sequence[TSRMatrix], axis: Axis, elements: Sequence[int], mesh: TSRMesh
) -> list[Traffic]:
    rows = []
    for dim in mesh.sharding:
        sizes = [n for m, n in zip(matrices, elements, strict=True) if dim in m.split(axis)]
        if sizes:
            rows.append(_row("all_reduce", "sketch", sum(sizes), dim))
    return rows


def _over_replicas(role: str, elements: int, mesh: TSRMesh) -> list[Traffic]:
    if mesh.replicas == 1 or not elements:
        return []
    return [_row("all_reduce", role, elements, "dp_replicate")]


def _row(op: str, role: str, elements: int, dim: str) -> Traffic:
    return Traffic("step", "optimizer", op, role, 1, elements, dim)


def _is_dense(matrix: TSRMatrix, mesh: TSRMesh, step: TSRStep) -> bool:
    """Whether a refresh sums a dense gradient, not the (1 + q)(m + n)k elements of sketches."""
    if step.refresh != "auto":
        return step.refresh == "dense"
    block = mesh.block(matrix)
    return prod(block) <= (1 + matrix.power_iterations) * sum(block) * matrix.width
