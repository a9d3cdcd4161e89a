# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Select the matrices of a spectral optimizer, by the names and shapes of parameters.

Factors of a linear are called ``NAME.A.weight`` (r, d_in) and ``NAME.B.weight`` (d_out, r). The
configuration check calls this before ranks start.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.optim.spectral.rules import RULES
from torchtitan_lr.optim.tsr.selection import EMBEDDING, HEAD


@dataclass(frozen=True)
class Selection:
    """The matrices of a model that a rule updates; AdamW updates all other parameters.

    Args:
        pairs: Names of A and B of every linear B A.
        dense: Names of the other matrices.
    """

    pairs: tuple[tuple[str, str], ...]
    dense: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self.dense).union(*self.pairs)


def select_matrices(shapes: Mapping[str, Sequence[int]], rule: str) -> Selection:
    """Select all matrices but the embedding and the head.

    Args:
        shapes: Global shape by name of every parameter.
        rule: The value of ``optimizer.name``. Muon takes every matrix, the others take factors.
    """
    pairs = factor_pairs(shapes)
    factors = set(chain.from_iterable(pairs))
    dense = []
    if not RULES[rule].pairs_only:
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


def stored_rule(names: Iterable[str]) -> str:
    """Return the rule that has saved a state; "" for another optimizer's.

    Args:
        names: Those of the tensors of the state, such as ``NAME.A.weight.muon_momentum``.
    """
    kinds = {name.rpartition(".")[2] for name in names}
    return next((rule.name for rule in RULES.values() if rule.momentum in kinds), "")


def check_rule(shapes: Mapping[str, Sequence[int]], rule: str) -> None:
    """Refuse a rule that no matrix of a model can have.

    Raises:
        ConfigError: With ``optimizer.name``.
    """
    if not select_matrices(shapes, rule).names:
        want = "'Muon' or 'AdamW' for a model without low-rank factors"
        raise ConfigError("optimizer.name", rule, want)
