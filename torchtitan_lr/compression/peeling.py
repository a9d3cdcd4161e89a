# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The limits of decoding a count sketch (TAGC): its θ and its size.

W is the number of ranks that exchange a gradient, m the number of compressed entries that each
owns afterwards, θ the share of unsent entries of a rank, and c the compression of the sketch.
"""

import math

from torchtitan_lr.compression.sizes import kept_entries

HASH_ROWS = 3
"""Rows of the count sketch."""

PEELING_LIMIT = 0.75
"""Largest accepted c·(union density); peeling fails between .78 and .82."""

SHARP_LIMIT = 0.818
"""Load at which peeling fails in an infinitely large sketch of three rows."""

SMALL_SKETCH = 1.2
"""A small sketch fails earlier: at `SHARP_LIMIT` minus this times row^(-2/3).

At that load 3 to 9% of the entries remain, on 2 to 8 ranks with 3 or more cells per row (measured).
From 75 cells on, `PEELING_LIMIT` is the smaller limit, and fewer entries remain.
"""

THETA_STEP = 1e-4
"""`smallest_theta` returns multiples of this, or of less."""


def sketch_row(m: int, c: float) -> int:
    """Return the cells in each of the three rows of a sketch: ⌈⌈m/c⌉ / 3⌉."""
    return -(-math.ceil(m / c) // HASH_ROWS)


def union_density(ranks: int, theta: float) -> float:
    """Return the share of entries sent by any of W independent ranks: 1 − θ^W."""
    return float(1 - theta**ranks)


def peels(c: float, theta: float, ranks: int) -> bool:
    """Return whether a large sketch of compression c decodes: c·(1 − θ^W) ≤ 0.75.

    `unit_load` and `load_limit` decide for one unit, by its size.
    """
    return c * union_density(ranks, theta) <= PEELING_LIMIT + 1e-12


def unit_load(m: int, c: float, theta: float, ranks: int) -> float:
    """Return the unknowns per cell of one destination's sketch, for independent ranks.

    It counts whole entries and cells: each rank sends at least one of m entries, and a row of the
    sketch has at least one cell, so the load of a small unit is above c·(1 − θ^W).

    Args:
        m: Compressed entries of the destination.
        c: Entries per cell.
        theta: Share of unsent entries of a rank.
        ranks: Ranks W.
    """
    unsent = (1 - kept_entries(m, theta) / m) ** ranks
    return m * (1 - unsent) / (HASH_ROWS * sketch_row(m, c))


def load_limit(m: int, c: float) -> float:
    """Return the largest load at which a sketch of m entries peels all but a few percent.

    In a small sketch, entries form an undecodable loop at lower loads (finite-size scaling of
    random hypergraphs, with exponent 2/3).
    """
    early = SMALL_SKETCH * sketch_row(m, c) ** (-2 / 3)
    return min(PEELING_LIMIT, SHARP_LIMIT - early)


def smallest_theta(c: float, ranks: int) -> float:
    """Return the smallest θ at which a sketch of compression c decodes, rounded up.

    The steps are 0.0001, or a tenth of 1 − θ if that is less, with many ranks.
    """
    if peels(c, 0.0, ranks):
        return 0.0
    exact = (1 - PEELING_LIMIT / c) ** (1 / ranks)
    step = min(THETA_STEP, 10.0 ** (math.floor(math.log10(1 - exact)) - 1))
    theta = round(math.ceil(exact / step - 1e-6) * step, 12)
    return theta if peels(c, theta, ranks) else round(theta + step, 12)
