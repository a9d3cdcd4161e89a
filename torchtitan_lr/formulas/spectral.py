# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a spectral optimizer sends and computes in a step, in closed form.

A matrix W is seen as (r, n): r is the rank of a factor, or the shorter side of another matrix.
Ranks that split n sum Gram matrices (r, r). These are symmetric, so that r (r + 1) / 2 numbers
travel for each. N is the momentum and u a vector (r,):

    Muon        N Nᵀ
    Spectron    N Nᵀ, W Wᵀu and |Wᵀu|²
    LoRA-Muon   N Nᵀ and W Wᵀ

The decay of products B A (``weight_decay_on = "products"``) sends W Wᵀ of every factor.
All matrices that the same ranks split are one all-reduce. Ranks that split r first gather N, and W
too if the rule reads it. Replicas send nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torchtitan_lr.formulas.traffic import Traffic

ITERATIONS = 5
"""Newton-Schulz iterations of a polar factor."""

ROOT_ITERATIONS = 8
"""Iterations of LoRA-Muon's inverse roots (A Aᵀ)^(-1/2) and (BᵀB)^(-1/2)."""


DECAY = "decay"
"""Stands for the decay of products where a function takes a rule."""


@dataclass(frozen=True)
class SpectralMatrix:
    """A matrix (r, n) and its split.

    Args:
        r: Its rank, or its shorter side.
        n: Its other side.
        rows: Mesh dimensions that split r, in the mesh's order.
        columns: Mesh dimensions that split n.
    """

    r: int
    n: int
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, size: Sequence[int], splits: Sequence[tuple[str, ...]]
    ) -> SpectralMatrix:
        """See a parameter as (r, n).

        Args:
            name: Its name, by which factors A (r, d_in) and B (d_out, r) are known.
            size: Its global size.
            splits: Mesh dimensions that split its first and its second dimension.
        """
        side = 0 if size[0] < size[1] else 1
        if name.endswith((".A.weight", ".B.weight")):
            side = int(name.endswith(".B.weight"))
        elif size[0] == size[1]:
            side = int(bool(splits[0]))  # of a square, the side that is whole
        return cls(size[side], size[1 - side], splits[side], splits[1 - side])

    def local_columns(self, ranks: Mapping[str, int]) -> int:
        """Return the columns that the first rank holds.

        Args:
            ranks: By mesh dimension.
        """
        return -(-self.n // prod(ranks[dim] for dim in self.columns))


def gram_numbers(rule: str, r: int) -> int:
    """Return the numbers that a rank sends of a matrix whose columns it shares with others."""
    triangle = r * (r + 1) // 2
    more = {"Spectron": r + 1, "LoRAMuon": triangle}
    return triangle + more.get(rule, 0)


def spectral_traffic(
    rule: str, matrices: Iterable[SpectralMatrix], ranks: Mapping[str, int]
) -> list[Traffic]:
    """Return a step's collectives on the first rank.

    Args:
        rule: ``Muon``, ``Spectron``, ``LoRAMuon`` or `DECAY`.
        matrices: A rank's.
        ranks: Ranks by mesh dimension.

    Returns:
        Rows of the scope and the pass ``optimizer``, with the roles ``gram`` and ``momentum``
        (the gathered weights included). A message over several mesh dimensions has their names,
        such as ``fsdp_tp``.
    """
    summed: Counter[tuple[str, ...]] = Counter()
    gathered: Counter[tuple[str, ...]] = Counter()
    for matrix in matrices:
        if matrix.columns:
            summed[matrix.columns] += gram_numbers(rule, matrix.r)
        if matrix.rows:
            # Mesh dimension by mesh dimension, pieces are padded to the largest.
            pieces, height = 1, matrix.r
            for dim in matrix.rows:
                pieces, height = pieces * ranks[dim], -(-height // ranks[dim])
            gathered[matrix.rows] += pieces * height * matrix.local_columns(ranks)
    calls = 1 if rule in ("Muon", DECAY) else 2
    return [
        *(_row("all_gather", "momentum", calls, calls * n, dims) for dims, n in gathered.items()),
        *(_row("all_reduce", "gram", 1, n, dims) for dims, n in summed.items()),
    ]


def _row(op: str, role: str, calls: int, elements: int, dims: tuple[str, ...]) -> Traffic:
    return Traffic("optimizer", "optimizer", op, role, calls, elements, "_".join(dims))


def small_flops(rule: str, r: int) -> int:
    """Return the FLOPs of the products (r, r) by (r, r) for one matrix.

    An iteration has four, G², P G P and P Q; the first saves P Q, and the last P G P. LoRA-Muon has
    another root, and two products of it on each side of G and of Q.
    """
    products = 4 * ITERATIONS - 3
    if rule == "LoRAMuon":
        products += 4 * ROOT_ITERATIONS - 3 + 4
    return products * 2 * r**3


def wide_flops(rule: str, matrix: SpectralMatrix, ranks: Mapping[str, int]) -> int:
    """Return the FLOPs of the products with the columns that a rank holds: N Nᵀ and Q N."""
    products = 3 if rule == "LoRAMuon" else 2  # W Wᵀ
    return products * 2 * matrix.r**2 * matrix.local_columns(ranks)
