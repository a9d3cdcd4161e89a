# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a count sketch can be decoded (TAGC): at which θ, and at which size.

W is the number of ranks that exchange a gradient, m the compressed entries that each of them owns
afterwards, θ the share of entries that a rank does not send, and c the compression of the sketch.
"""

import math

from torchtitan_lr.compression.sizes import kept_entries

HASH_ROWS = 3
"""Rows of the count sketch."""

PEELING_LIMIT = 0.75
"""Largest c·(union density) at which peeling is relied upon; it breaks between .78 and .82."""

SHARP_LIMIT = 0.818
"""Load at which peeling breaks in an endless sketch of three rows."""

SMALL_SKETCH = 1.2
"""How much earlier it breaks in a small one: at `SHARP_LIMIT` less this times row^(-2/3).

At that load 3 to 9% of the entries remain, on 2 to 8 ranks and from 3 cells a row up (measured).
From 75 cells on `PEELING_LIMIT` is the lower limit, and ever fewer remain.
"""

THETA_STEP = 1e-4
"""Sparsities are named in steps of this, or less."""


def sketch_row(m: int, c: float) -> int:
    """Cells in each of the three rows of a sketch: ⌈⌈m/c⌉ / 3⌉."""
    return -(-math.ceil(m / c) // HASH_ROWS)


def union_density(ranks: int, theta: float) -> float:
    """Share of entries sent by any of W ranks, where they choose independently: 1 − θ^W."""
    return float(1 - theta**ranks)


def peels(c: float, theta: float, ranks: int) -> bool:
    """Return whether a large sketch of compression c decodes: c·(1 − θ^W) ≤ 0.75.

    `unit_load` and `load_limit` decide for one unit, by its size.
    """
    return c * union_density(ranks, theta) <= PEELING_LIMIT + 1e-12


def unit_load(m: int, c: float, theta: float, ranks: int) -> float:
    """Unknowns for each cell of one destination's sketch, where ranks choose independently.

    The whole entries and cells of a real exchange: of m entries each rank sends at least one, and
    a row of the sketch has at least one cell, so that a small unit's load is above c·(1 − θ^W).

    Args:
        m: Compressed entries of the destination.
        c: Entries per cell.
        theta: Share of entries that a rank does not send.
        ranks: Ranks W.
    """
    unsent = (1 - kept_entries(m, theta) / m) ** ranks
    return m * (1 - unsent) / (HASH_ROWS * sketch_row(m, c))


def load_limit(m: int, c: float) -> float:
    """Largest load at which a sketch of m entries peels but for a few percent of them.

    Whether three cells hold a loop of entries is a matter of luck: in a small sketch it happens at
    lower loads (finite-size scaling of random hypergraphs, whose exponent is 2/3).
    """
    early = SMALL_SKETCH * sketch_row(m, c) ** (-2 / 3)
    return min(PEELING_LIMIT, SHARP_LIMIT - early)


def smallest_theta(c: float, ranks: int) -> float:
    """Smallest θ at which a sketch of compression c decodes, rounded up.

    In steps of 0.0001, and of at most a tenth of 1 − θ where many ranks leave little to send.
    """
    if peels(c, 0.0, ranks):
        return 0.0
    exact = (1 - PEELING_LIMIT / c) ** (1 / ranks)
    step = min(THETA_STEP, 10.0 ** (math.floor(math.log10(1 - exact)) - 1))
    theta = round(math.ceil(exact / step - 1e-6) * step, 12)
    return theta if peels(c, theta, ranks) else round(theta + step, 12)
