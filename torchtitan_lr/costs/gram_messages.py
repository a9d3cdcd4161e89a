# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a spectral optimizer sends and computes in a step, in closed form.

A matrix W is seen as (r, n): r is the rank of a factor, or the shorter side of another matrix.
Ranks that split n sum Gram matrices (r, r). These are symmetric, so that r (r + 1) / 2 numbers
travel for each. N is the momentum and u a vector (r,):

    Muon        N Nᵀ
    Spectron    N Nᵀ, W Wᵀu and |Wᵀu|²
    LoRA-Muon   N Nᵀ and W Wᵀ

N ranks share the products of (r, r) matrices: each gets the sums of an equal number of linears
(reduce-scatter), and all get their symmetric Q and Spectron's next u (all-gather). These are as
many bytes as an all-reduce of the sums. Fewer than N linears of one r are left over, and so are
those whose A and B are split by other ranks: every rank gets these sums (all-reduce).

Ranks that split r first gather N, and LoRA-Muon W too; Spectron sums Wᵀu and gathers W Wᵀu, vectors
of n and r numbers. If these ranks do not split n, they share the products without a sum: each has
the Gram matrices. Replicas send nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

from torchtitan_lr.costs.messages import Traffic, merge

ITERATIONS = 5  # Newton-Schulz iterations of a polar factor
ROOT_ITERATIONS = 8  # iterations of LoRA-Muon's inverse roots (A Aᵀ)^(-1/2) and (BᵀB)^(-1/2)


class Rule(NamedTuple):
    """What a rule needs of every matrix in a step."""

    together: int  # matrices that are updated together: one, or the A and the B of a linear
    grams: int  # Gram matrices: of N, and maybe of W
    vectors: int  # vectors u
    # Passes over the matrix: to read the gradient and the momentum and write one of them, by the
    # verdict on the step; to read that and the momentum, write the momentum, and read or write
    # Nesterov's form of it three times; to read that for its Gram matrix; and two kernels of the
    # update, which read the weight and write it, with that form in one of them. Spectron reads the
    # weight twice more, for its norm, and LoRA-Muon once, for its Gram matrix.
    passes: int
    # Those of (r, r) matrices work on batches, and those of momenta and decays on lists.
    kernels: int

    def summed(self, r: int) -> int:
        """Return the numbers that a rank sends of a matrix whose columns it shares with others."""
        return self.grams * triangle(r) + self.vectors * (r + 1)

    def returned(self, r: int) -> int:
        """Return the numbers of the symmetric Q, and of the next u."""
        return triangle(r) + self.vectors * r

    def small_flops(self, r: int) -> int:
        """Return the FLOPs of the products (r, r) by (r, r) for one matrix.

        An iteration has four, G², P G P and P Q; the first saves P Q, the last P G P. LoRA-Muon has
        another root, and two products of it on each side of G and of Q.
        """
        products = 4 * ITERATIONS - 3
        if self.grams == 2:
            products += 4 * ROOT_ITERATIONS - 3 + 4
        return products * 2 * r**3


RULES = {
    "Muon": Rule(together=1, grams=1, vectors=0, passes=15, kernels=3),
    "Spectron": Rule(together=2, grams=1, vectors=1, passes=17, kernels=6),
    "LoRAMuon": Rule(together=2, grams=2, vectors=0, passes=16, kernels=4),
}


def triangle(r: int) -> int:
    """Return the numbers of a symmetric matrix (r, r) that travel."""
    return r * (r + 1) // 2


Sharing = tuple[tuple[str, ...], bool]
"""Mesh dimensions whose ranks share products (r, r), and whether each rank already has the sums."""


@dataclass(frozen=True)
class SpectralMatrix:
    """A matrix (r, n) and its split."""

    r: int  # its rank, or its shorter side
    n: int  # its other side
    rows: tuple[str, ...] = ()  # mesh dimensions that split r, in the mesh's order
    columns: tuple[str, ...] = ()  # mesh dimensions that split n

    @classmethod
    def of(
        cls, name: str, size: Sequence[int], splits: Sequence[tuple[str, ...]]
    ) -> SpectralMatrix:
        """See a parameter as (r, n); factors A (r, d_in), B (d_out, r) are known by their names."""
        side = 0 if size[0] < size[1] else 1
        if name.endswith((".A.weight", ".B.weight")):
            side = int(name.endswith(".B.weight"))
        elif size[0] == size[1]:
            side = int(bool(splits[0]))  # of a square, the side that is whole
        return cls(size[side], size[1 - side], splits[side], splits[1 - side])

    def local_columns(self, ranks: Mapping[str, int]) -> int:
        """Return the columns that the first rank holds."""
        return -(-self.n // prod(ranks[dim] for dim in self.columns))

    def padded_rows(self, ranks: Mapping[str, int]) -> int:
        """Return the rows that are gathered: pieces are padded to the largest by mesh dimension."""
        pieces, height = 1, self.r
        for dim in self.rows:
            pieces, height = pieces * ranks[dim], -(-height // ranks[dim])
        return pieces * height


def shared_matrices(
    rule: Rule, matrices: Sequence[SpectralMatrix], ranks: Mapping[str, int]
) -> tuple[dict[Sharing, list[SpectralMatrix]], list[SpectralMatrix]]:
    """Tell which matrices the ranks share out among them.

    Return the shared ones by the mesh dimensions of these ranks and by whether each already has the
    sums, and those of which every rank computes Q. `matrices` are a rank's, each A followed by its
    B.
    """
    kinds: dict[tuple[Sharing, int], list[Sequence[SpectralMatrix]]] = defaultdict(list)
    for start in range(0, len(matrices), rule.together):
        linear = matrices[start : start + rule.together]
        splits = {(matrix.columns or matrix.rows, not matrix.columns) for matrix in linear}
        kinds[splits.pop() if len(splits) == 1 else ((), True), linear[0].r].append(linear)
    shared: dict[Sharing, list[SpectralMatrix]] = defaultdict(list)
    left: list[SpectralMatrix] = []
    for (sharing, _), linears in kinds.items():
        dims, _ = sharing
        even = len(linears) - len(linears) % prod(ranks[dim] for dim in dims) if dims else 0
        shared[sharing] += chain(*linears[:even])
        left += chain(*linears[even:])
    return {sharing: found for sharing, found in shared.items() if found}, left


def spectral_traffic(
    rule: Rule, matrices: Sequence[SpectralMatrix], ranks: Mapping[str, int]
) -> list[Traffic]:
    """Return a step's collectives on the first rank; arguments as in `shared_matrices`.

    Rows have the roles ``gram`` (the gathered Q and Spectron's vectors included) and ``momentum``
    (the gathered weights included). A message over several mesh dimensions has their names, such as
    ``fsdp_tp``.
    """
    by_rows: dict[tuple[str, ...], list[SpectralMatrix]] = defaultdict(list)
    for matrix in matrices:
        if matrix.rows:
            by_rows[matrix.rows].append(matrix)
    rows: list[Traffic] = []
    for dims, split in by_rows.items():
        numbers = sum(m.padded_rows(ranks) * m.local_columns(ranks) for m in split)
        # N, and W if its Gram matrix is needed
        rows.append(_row("all_gather", "momentum", rule.grams, rule.grams * numbers, dims))
        if rule.vectors:
            width = sum(matrix.local_columns(ranks) for matrix in split)
            height = sum(matrix.padded_rows(ranks) for matrix in split)
            rows.append(_row("all_reduce", "gram", 1, width, dims))
            rows.append(_row("all_gather", "gram", 1, height, dims))
    shared, left = shared_matrices(rule, matrices, ranks)
    for (dims, equal), found in shared.items():
        summed = sum(rule.summed(matrix.r) for matrix in found)
        returned = sum(rule.returned(matrix.r) for matrix in found)
        if not equal:
            rows.append(_row("reduce_scatter", "gram", 1, summed, dims))
        rows.append(_row("all_gather", "gram", 1, returned, dims))
    everywhere: Counter[tuple[str, ...]] = Counter()
    for matrix in left:
        if matrix.columns:
            everywhere[matrix.columns] += rule.summed(matrix.r)
    rows += [_row("all_reduce", "gram", 1, n, dims) for dims, n in everywhere.items()]
    return merge(rows)


def _row(op: str, role: str, calls: int, elements: int, dims: tuple[str, ...]) -> Traffic:
    return Traffic("optimizer", "optimizer", op, role, calls, elements, "_".join(dims))


def spectral_flops(
    rule: Rule, matrices: Sequence[SpectralMatrix], ranks: Mapping[str, int]
) -> float:
    """Return the FLOPs of a rank's products in a step; arguments as in `shared_matrices`."""
    shared, left = shared_matrices(rule, matrices, ranks)
    flops = float(sum(rule.small_flops(matrix.r) for matrix in left))
    for (dims, _), found in shared.items():
        together = sum(rule.small_flops(matrix.r) for matrix in found)
        flops += together / prod(ranks[dim] for dim in dims)
    for matrix in matrices:
        # With a rank's columns: N Nᵀ, maybe W Wᵀ, and Q N of its own rows
        own_rows = matrix.padded_rows(ranks) // prod(ranks[dim] for dim in matrix.rows)
        columns = matrix.local_columns(ranks)
        flops += 2 * (rule.grams * matrix.r + own_rows) * matrix.r * columns
    return flops
