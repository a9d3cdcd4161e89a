# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Select the matrices of an optimizer, by the names and shapes of parameters.

Factors of a linear are called ``NAME.A.weight`` (r, d_in) and ``NAME.B.weight`` (d_out, r). The
configuration check calls this before ranks start.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torchtitan_lr.optim.entries import Updates
from torchtitan_lr.optim.tsr.selection import EMBEDDING, HEAD


class Selection(NamedTuple):
    """Matrices of a model, by name."""

    pairs: list[tuple[str, str]]  # A and B of every linear B A
    names: frozenset[str]  # theirs, and those of the other matrices


def select_matrices(shapes: Mapping[str, Sequence[int]], updates: Updates) -> Selection:
    """Select, from global shapes by name, all matrices but embedding and head, or the factors."""
    pairs = []
    for name in shapes:
        other = f"{name.removesuffix('A.weight')}B.weight"
        if name.endswith(".A.weight") and other in shapes:
            pairs.append((name, other))
    names = set(chain.from_iterable(pairs))
    if updates != "factors":
        names.update(name for name, shape in shapes.items() if len(shape) == 2)
        names -= {EMBEDDING, HEAD}
    return Selection(pairs, frozenset(names))
