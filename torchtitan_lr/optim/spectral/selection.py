# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Select the matrices of an optimizer, by the names and shapes of parameters.

Factors of a linear are called ``NAME.A.weight`` (r, d_in) and ``NAME.B.weight`` (d_out, r). The
configuration check calls this before ranks start.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torchtitan_lr.optim.entries import Updates
from torchtitan_lr.optim.tsr.selection import EMBEDDING, HEAD


@dataclass(frozen=True)
class Selection:
    """Matrices of a model, by name."""

    pairs: tuple[tuple[str, str], ...]
    """A and B of every linear B A."""
    dense: tuple[str, ...]
    """The other matrices."""

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self.dense).union(*self.pairs)


def select_matrices(shapes: Mapping[str, Sequence[int]], updates: Updates) -> Selection:
    """Select, from global shapes by name, all matrices but embedding and head, or the factors."""
    pairs = factor_pairs(shapes)
    factors = set(chain.from_iterable(pairs))
    dense = []
    if updates != "factors":
        for name, shape in shapes.items():
            if len(shape) == 2 and name not in (EMBEDDING, HEAD) and name not in factors:
                dense.append(name)
    return Selection(tuple(pairs), tuple(dense))


def factor_pairs(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the names of A and B of every linear B A."""
    pairs = []
    for name in names:
        other = f"{name.removesuffix('A.weight')}B.weight"
        if name.endswith(".A.weight") and other in names:
            pairs.append((name, other))
    return pairs
