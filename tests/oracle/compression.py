# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TAGC: bits per entry, and the least share θ at which a large sketch peels."""

from fractions import Fraction

from torchtitan_lr.formulas.compression import (
    CodecNumbers,
    Exchange,
    _decimal,
    all_reduce_traffic,
    reduce_scatter_traffic,
    replicated,
)


def paper_bits(c: float, index_bits: int, algorithm: str = "tagc") -> dict[str, float]:
    """Bits per parameter and rank by operation, as the paper counts them (Figures 1 and 2).

    An all-reduce counts twice, a reduce once. TAGC all-reduces the index and reduces the sketch;
    LHC, its ancestor, all-reduces both.

    Args:
        c: Compression of the sketch; 1 with no index is the uncompressed reduction.
        index_bits: Bits of the index per parameter: 0, 1 or 4.
        algorithm: ``tagc`` or ``lhc``.
    """
    calls = {"tagc": 1, "lhc": 2}[algorithm]
    return {"index": 2.0 * index_bits, "sketch": calls * 32 / c}


def large_sketch_peels(c: float, theta: float, ranks: int) -> bool:
    """Whether the unknowns of an endless sketch are at most three quarters of its cells.

    An entry is in no message with probability θ^W, so m(1 − θ^W) of m entries are unknown, and
    there are m/c cells. Exact for the decimal numbers that c and θ are.

    Args:
        c: Entries per cell.
        theta: Share θ of entries that a rank does not send.
        ranks: Ranks W.
    """
    return 1 - _decimal(theta) ** ranks <= Fraction(3, 4) / _decimal(c)


def least_theta(c: float, ranks: int) -> float:
    """Return the least θ of so many decimals at which a large sketch peels.

    Four decimals, or one more than θ has leading nines where that is more. Found by bisection in
    whole numbers, without roots or logarithms.

    Args:
        c: Entries per cell.
        ranks: Ranks W.
    """

    def peels(numerator: int, decimals: int) -> bool:
        theta = Fraction(numerator, 10**decimals)
        return 1 - theta**ranks <= Fraction(3, 4) / _decimal(c)

    if peels(0, 0):
        return 0.0
    nines = 1
    while not peels(10**nines - 1, nines):
        nines += 1
    decimals = max(4, nines + 1)
    low, high = 0, 10**decimals  # the first does not peel, the last does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peels(middle, decimals) else (middle, high)
    return float(Fraction(high, 10**decimals))


def bits_per_entry(codec: CodecNumbers, ranks: int, all_reduce: bool) -> float:
    """Bits that a rank sends per compressed entry of a very large unit.

    The bytes of the exact rows at 10¹⁵ entries a destination, where neither whole cells, the
    verdict's 128 bytes nor the 10⁻⁹ of `sent_entries` show in six digits.

    Args:
        codec: What travels.
        ranks: Ranks W.
        all_reduce: Whether every rank needs the whole sum; an all-reduced entry counts once.
    """
    m = 10**15
    rows_of = all_reduce_traffic if all_reduce else reduce_scatter_traffic
    exchange = replicated(ranks * m, 0, ranks, codec) if all_reduce else Exchange(ranks, m)
    size = {"index": 1, "gradient": 4}
    sent = sum(size[row.role] * row.elements for row in rows_of(exchange, codec, "unit"))
    return float(Fraction(8 * sent, ranks * m))
