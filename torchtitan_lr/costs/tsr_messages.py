# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of one TSR-Adam step in closed form, from the paper.

A step without refresh sums cores over each mesh dimension that splits a matrix and over the
replicas, one call per bucket, and dense gradients over the replicas. A refresh adds the sketches Y,
Z and B, what their QR gathers, bases that ranks find for each other, and checksums, in rounds of
matrices that are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import TYPE_CHECKING, Literal, TypeVar

from torchtitan_lr.costs.messages import Traffic, merge, of_pass

if TYPE_CHECKING:
    from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings

Axis = Literal["rows", "columns"]
Item = TypeVar("Item")

BUCKET = 2**26  # elements of a bucket of dense gradients, and of what a refresh holds at a time


@dataclass(frozen=True)
class TSRMatrix:
    """A compressed matrix and its split, transposed if it is projected transposed."""

    plan: MatrixPlan  # sides m and n, rank r, width k, and iterations q of the matrix
    # Ranks by mesh dimension that splits the rows, and the columns, in the mesh's order
    rows: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> object:
        """What matrices that the optimizer stacks have in common."""
        plan = self.plan
        shape = (plan.rows, plan.columns, plan.rank, plan.power_iterations, plan.transposed)
        return shape, (*self.rows,), (*self.columns,)

    @cached_property
    def block(self) -> tuple[int, int]:
        """The rows and columns of the largest block, each rounded up."""
        rows, columns = prod(self.rows.values()), prod(self.columns.values())
        return ceil(self.plan.rows / rows), ceil(self.plan.columns / columns)

    @property
    def core(self) -> int:
        """The elements of the core: r×r, one-sided r×n."""
        return self.plan.rank * (self.plan.rank if self.plan.two_sided else self.block[1])

    @property
    def contracted(self) -> tuple[str, ...]:
        """The mesh dimensions whose ranks each have a term of the core."""
        return (*self.rows, *(self.columns if self.plan.two_sided else ()))

    @cached_property
    def refreshes_densely(self) -> bool:
        """Whether a refresh sums the gradient over the replicas, and no sketches.

        A sketch of width k costs (1 + q)(m + n)k: Y (m, k) and B (k, n), and for each power
        iteration Z (n, k) and Y again. ``auto`` sends the gradient if that is not more.
        """
        plan = self.plan
        sketches = (1 + plan.power_iterations) * sum(self.block) * plan.width
        cheaper = plan.refresh == "auto" and prod(self.block) <= sketches
        return plan.refresh == "dense" or cheaper

    def gathered(self, axis: Axis) -> dict[str, int]:
        """Return what the QR factorization of a sketch gathers, by the dimensions that split it.

        Each rank sends its rows of the sketch, or its triangle (k, k), whichever is less.
        """
        k = self.plan.width
        length, split = self.block[0], self.rows
        if axis == "columns":
            length, split = self.block[1], self.columns
        elements = {}
        for dim, size in split.items():
            length = size * min(length, k)
            elements[dim] = length * k
        return elements

    @property
    def held(self) -> int:
        """The elements of a refresh's sketches, (m, k) and (n, k), and its largest gather."""
        gathers = *self.gathered("rows").values(), *self.gathered("columns").values()
        return sum(self.block) * self.plan.width + max(gathers, default=0)


def tsr_traffic(
    matrices: Sequence[TSRMatrix],
    refreshing: Collection[int],
    dense: Sequence[int],
    replicas: Mapping[str, int],
    settings: TSRSettings,
) -> list[Traffic]:
    """Return the optimizer's collectives in one step, on the rank with the largest blocks.

    `matrices`, and the elements of a rank's part of all others, `dense`, are in the order of
    backward: the last module first. `replicas` is the mesh dimension of ranks with equal
    parameters and their number, if there is one.
    """
    rows: list[Traffic] = []
    plain = [m for i, m in enumerate(matrices) if i not in refreshing]
    cores = [m.core for m in plain]
    for bucket in _buckets(plain, cores, ceil(sum(cores) / settings.overlap_buckets)):
        rows += _sums("core", (((*m.contracted, *replicas), m.core) for m in bucket))
    # The optimizer stacks matrices that are alike, in the model's order.
    kinds = list(dict.fromkeys(m.kind for m in reversed(matrices)))
    fresh = [matrices[i] for i in sorted(refreshing, reverse=True)]
    fresh.sort(key=lambda m: kinds.index(m.kind))
    whole = [*dense, *(prod(m.block) for m in fresh if m.refreshes_densely)]
    most = min(BUCKET, ceil(sum(whole) / settings.overlap_buckets))
    for sizes in _buckets(whole, whole, most):
        rows += _sums("gradient", [(replicas, sum(sizes))])
    for kind in kinds:
        alike = [m for m in fresh if m.kind == kind]
        for bucket in _buckets(alike, [m.held for m in alike], BUCKET):
            rows += _refresh(bucket, replicas, settings)
    return merge(rows)


def _refresh(
    fresh: Sequence[TSRMatrix], replicas: Mapping[str, int], settings: TSRSettings
) -> list[Traffic]:
    """Return one round: the sums Y, (Z, Y)·q, B with a QR after each, bases, signs, checksums.

    Of the bases (k, 2k + 1) of all matrices the ranks of a dimension each find a part, which those
    of the next dimension share.
    Signs come from the sketch and then, for each projected side, from the earlier bases, in one sum
    with the test whether the new ones are orthonormal.
    """
    rows: list[Traffic] = []
    axes: list[Axis] = ["columns", *(("rows", "columns") * fresh[0].plan.power_iterations), "rows"]
    for axis in axes:
        # Y and Z are summed over one axis and have the length of the other axis.
        side = 0 if axis == "columns" else 1
        other: Axis = "rows" if axis == "columns" else "columns"
        sketches, gathers = [], Counter[str]()
        for m in fresh:
            over = () if m.refreshes_densely else (*replicas,)
            sketches.append(((*getattr(m, axis), *over), m.block[side] * m.plan.width))
            gathers.update(m.gathered(other))
        rows += _sums("sketch", sketches)
        rows += [_row("all_gather", "sketch", n, dim) for dim, n in gathers.items()]
    found, k = len(fresh), fresh[0].plan.width
    sharing = {**fresh[0].rows, **fresh[0].columns, **(replicas if settings.share_refresh else {})}
    for dim, ranks in sharing.items():
        if found > 1:
            rows.append(_row("all_reduce", "basis", found * k * (2 * k + 1), dim))
            found = ceil(found / ranks)
    both = [m for m in fresh if m.plan.two_sided]
    r = fresh[0].plan.rank
    signs: list[tuple[Sequence[TSRMatrix], Axis, int]]
    signs = [(fresh, "columns", r), (fresh, "rows", 2 * r), (both, "columns", 2 * r)]
    if settings.moments == "rotate":
        signs += [(fresh, "rows", r * r), (both, "columns", r * r)]
    for matrices, axis, numbers in signs:
        rows += _sums("sketch", ((getattr(m, axis), numbers) for m in matrices))
    return [*rows, *_sums("checksum", [(replicas, 2 * len(fresh))])]


def _sums(role: str, parts: Iterable[tuple[Iterable[str], int]]) -> list[Traffic]:
    """Return an all-reduce over each mesh dimension of the elements that go over it, together."""
    elements: Counter[str] = Counter()
    for dims, size in parts:
        for dim in dims:
            elements[dim] += size
    return [_row("all_reduce", role, n, dim) for dim, n in elements.items() if n]


def _row(op: str, role: str, elements: int, dim: str) -> Traffic:
    return of_pass("optimizer", op, [elements], role, "step", dim)


def _buckets(items: Sequence[Item], sizes: Sequence[int], limit: int) -> list[list[Item]]:
    """Return runs of items of at most ``limit`` elements together, or of a larger item."""
    result: list[list[Item]] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if not result or filled + size > limit:
            result.append([])
            filled = 0
        result[-1].append(item)
        filled += size
    return result
