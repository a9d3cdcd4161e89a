# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TAGC: bits per parameter, as its paper counts them."""


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
