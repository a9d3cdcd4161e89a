# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one TSR-Adam step in closed form.

A step without refresh sums cores over each mesh dimension that splits a matrix and over the
replicas, in one call per bucket, and dense gradients over the replicas likewise. A refresh adds the
sketches Y, Z and B (`randomized_svd`), the triangles of the QR factorizations, and checksums, in
rounds shared by the refreshing matrices with equal q. Elements are counted like in the ledger.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod

from torchtitan_lr.formulas.traffic import Traffic, merge

BUCKET_ELEMENTS = 2**26
"""Elements of a bucket of dense gradients, and of the sketches in memory at a time.

Like blocks and buckets, this is stated independently of the optimizer (`optim/tsr/sizes`).
"""


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
        power_iterations: q of this matrix; None for the step's.
    """

    rows: int
    columns: int
    rank: int
    width: int
    row_split: tuple[str, ...] = ()
    column_split: tuple[str, ...] = ()
    two_sided: bool = True
    power_iterations: int | None = None


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


@dataclass(frozen=True)
class TSRStep:
    """Settings that determine the traffic.

    Args:
        power_iterations: q.
        refresh: ``auto``, ``sketch`` or ``dense``.
        rotates: Whether moments are rotated into new bases.
        buckets: Number of all-reduces for the cores, and of those for dense gradients.
    """

    power_iterations: int = 1
    refresh: str = "auto"
    rotates: bool = True
    buckets: int = 1


def padded_block(size: int, ranks: Iterable[int]) -> int:
    """Return the rows (or columns) of the largest block: size / product of ranks, rounded up.

    Args:
        size: Rows (or columns) of the whole matrix.
        ranks: Size of each mesh dimension that splits it.
    """
    return ceil(size / prod(ranks))


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


def refresh_is_dense(rows: int, columns: int, width: int, step: TSRStep) -> bool:
    """Return whether a refresh sums dense gradients, not sketches, over the replicas.

    Args:
        rows: Rows of a rank's block.
        columns: Columns of a rank's block.
        width: k.
        step: The refresh setting, and q.
    """
    if step.refresh != "auto":
        return step.refresh == "dense"
    return rows * columns <= sketch_elements(rows, columns, width, step.power_iterations)


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
    whole = [*dense, *(prod(_block(m, mesh)) for m in fresh if _is_dense(m, mesh, step))]
    most = min(BUCKET_ELEMENTS, ceil(sum(whole) / step.buckets))
    for bucket in bucket_runs(whole, most):
        rows += _over_replicas("gradient", sum(whole[i] for i in bucket), mesh)
    sizes = [sum(_block(m, mesh)) * m.width for m in fresh]
    for bucket in bucket_runs(sizes, BUCKET_ELEMENTS):
        for q in {_iterations(fresh[i], step) for i in bucket}:
            alike = [fresh[i] for i in bucket if _iterations(fresh[i], step) == q]
            rows += _refresh(alike, mesh, replace(step, power_iterations=q))
    rows += [_row("all_reduce", "norm", 1, dim) for dim in mesh.sharding]
    if mesh.stages > 1:
        rows.append(_row("all_reduce", "norm", 1, "pp"))
    return merge(rows)


def _cores(plain: Sequence[TSRMatrix], mesh: TSRMesh, step: TSRStep) -> list[Traffic]:
    sizes = [_core_elements(m, mesh) for m in plain]
    rows: list[Traffic] = []
    for bucket in bucket_runs(sizes, ceil(sum(sizes) / step.buckets)):
        for dim in mesh.sharding:
            summed = [i for i in bucket if dim in _contracted(plain[i])]
            if summed:
                rows.append(_row("all_reduce", "core", sum(sizes[i] for i in summed), dim))
        rows += _over_replicas("core", sum(sizes[i] for i in bucket), mesh)
    return rows


def _refresh(fresh: Sequence[TSRMatrix], mesh: TSRMesh, step: TSRStep) -> list[Traffic]:
    """Return one round: the sums Y, (Z, Y)·q, B with a QR after each, signs, checksums.

    Signs come from the sketch and then, for each projected side, from the earlier bases.
    """
    rows: list[Traffic] = []
    for axis in ("columns", *("rows", "columns") * step.power_iterations, "rows"):
        # Y and Z are summed over one axis and have the length of the other.
        lengths = [_block(m, mesh)[0 if axis == "columns" else 1] for m in fresh]
        sketches = [n * m.width for n, m in zip(lengths, fresh, strict=True)]
        rows += _sum(fresh, axis, sketches, mesh)
        sent = [
            size for m, size in zip(fresh, sketches, strict=True) if not _is_dense(m, mesh, step)
        ]
        rows += _over_replicas("sketch", sum(sent), mesh)
        other = "rows" if axis == "columns" else "columns"
        for dim, ranks in mesh.sharding.items():
            gathered = sum(ranks * m.width**2 for m in fresh if dim in _split(m, other))
            if gathered:
                rows.append(_row("all_gather", "sketch", gathered, dim))
    both = [m for m in fresh if m.two_sided]
    rows += _sum(fresh, "columns", [m.rank for m in fresh], mesh)
    rows += _sum(fresh, "rows", [m.rank for m in fresh], mesh)
    rows += _sum(both, "columns", [m.rank for m in both], mesh)
    rows += _over_replicas("checksum", 2 * len(fresh), mesh)
    if step.rotates:
        squares = [m.rank**2 for m in fresh]
        rows += _sum(fresh, "rows", squares, mesh)
        rows += _sum(both, "columns", [m.rank**2 for m in both], mesh)
    return rows


def _sum(
    matrices: Sequence[TSRMatrix], axis: str, elements: Sequence[int], mesh: TSRMesh
) -> list[Traffic]:
    rows = []
    for dim in mesh.sharding:
        sizes = [n for m, n in zip(matrices, elements, strict=True) if dim in _split(m, axis)]
        if sizes:
            rows.append(_row("all_reduce", "sketch", sum(sizes), dim))
    return rows


def _over_replicas(role: str, elements: int, mesh: TSRMesh) -> list[Traffic]:
    if mesh.replicas == 1 or not elements:
        return []
    return [_row("all_reduce", role, elements, "dp_replicate")]


def _row(op: str, role: str, elements: int, dim: str) -> Traffic:
    return Traffic("step", "optimizer", op, role, 1, elements, dim)


def _block(matrix: TSRMatrix, mesh: TSRMesh) -> tuple[int, int]:
    rows = padded_block(matrix.rows, (mesh.sharding[dim] for dim in matrix.row_split))
    return rows, padded_block(matrix.columns, (mesh.sharding[d] for d in matrix.column_split))


def _core_elements(matrix: TSRMatrix, mesh: TSRMesh) -> int:
    return matrix.rank * (matrix.rank if matrix.two_sided else _block(matrix, mesh)[1])


def _contracted(matrix: TSRMatrix) -> tuple[str, ...]:
    return matrix.row_split + (matrix.column_split if matrix.two_sided else ())


def _split(matrix: TSRMatrix, axis: str) -> tuple[str, ...]:
    return matrix.row_split if axis == "rows" else matrix.column_split


def _is_dense(matrix: TSRMatrix, mesh: TSRMesh, step: TSRStep) -> bool:
    own = replace(step, power_iterations=_iterations(matrix, step))
    return refresh_is_dense(*_block(matrix, mesh), matrix.width, own)


def _iterations(matrix: TSRMatrix, step: TSRStep) -> int:
    q = matrix.power_iterations
    return step.power_iterations if q is None else q


def sketch_width(side: Sequence[int], rank: int, oversampling: int) -> int:
    """Return the columns k = min(r + p, m, n) of a sketch."""
    return min(rank + oversampling, *side)


def sketch_elements(rows: int, columns: int, width: int, power_iterations: int) -> int:
    """Return the elements (1 + q)(m + n)k of all sketches of a refresh."""
    return (1 + power_iterations) * (rows + columns) * width
