# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The sizes of an exchange that do not depend on the codec (TAGC).

W is the number of ranks that exchange a gradient, m the number of compressed entries that each owns
afterwards, θ the share of unsent entries of a rank, and c the compression of the count sketch. A
codec's own sizes are in its file in ``codecs/``. ``formulas/compression.py`` states the same sizes
independently, and the ledger's comparison shows any difference.
"""

import math
from dataclasses import dataclass

LEVELS: dict[str, tuple[float, float]] = {"2x": (2, 0.8), "4x": (4, 0.9), "10x": (10, 0.9875)}
"""Compression c and sparsity θ of the published levels (TAGC, Table 1)."""

VALUE_BYTES = 4
"""Bytes of an entry; gradients are exchanged in fp32."""

VERDICT_BITS = 1024
"""Largest number of blocks per destination in the owner's verdict."""


@dataclass(frozen=True)
class CodecSizes:
    """The parameters that determine the sizes of a codec's messages.

    Args:
        name: The registered name of the codec.
        c: Entries per cell of the sketch.
        theta: Share of unsent entries.
        index: ``exact`` or ``sum1``: the form in which a sketch's owner receives the
            positions of sent entries.
    """

    name: str
    c: float = 1.0
    theta: float = 0.0
    index: str = "exact"


DENSE = CodecSizes("dense")
"""The uncompressed exchange on the codecs' path."""


@dataclass(frozen=True)
class Unit:
    """One exchange: a reduce-scatter of W rows.

    Args:
        ranks: Ranks W.
        compressed: Compressed entries m of each destination.
        dense: Uncompressed entries of each destination.
    """

    ranks: int
    compressed: int
    dense: int = 0


def exchange_unit(compressed: int, dense: int, ranks: int, lossy: bool, all_reduce: bool) -> Unit:
    """Return the exchange of a unit of the model.

    Args:
        compressed: Compressed entries of a destination, or of the whole shard for `all_reduce`.
        dense: The other entries, likewise.
        ranks: Ranks W.
        lossy: Whether the codec can leave entries unsent.
        all_reduce: Whether every rank needs the whole sum.
    """
    if not all_reduce:
        return Unit(ranks, compressed, dense)
    if not (lossy and compressed):
        return Unit(ranks, 0, dense + compressed)  # one plain all-reduce
    return Unit(ranks, -(-compressed // ranks), dense)


def kept_entries(m: int, theta: float) -> int:
    """Return the number of sent entries of m: at most a share 1 − θ, at least one."""
    # The small number because 0.9·10 is slightly more than 9 in floating point.
    return max(1, m - math.ceil(theta * m - 1e-9 * m))


def packed_bytes(m: int) -> int:
    """Return the bytes of an index of m entries, one bit each."""
    return -(-m // 8)


def verdict_block(m: int) -> int:
    """Return the number of consecutive entries per bit of the owner's verdict."""
    return -(-m // VERDICT_BITS)


def candidates(ranks: int, m: int, theta: float) -> int:
    """Return the largest number of distinct entries that W ranks can send to one destination."""
    return min(m, ranks * kept_entries(m, theta))


def spreads_packed(unit: Unit, codec: CodecSizes) -> bool:
    """Return whether a sum is returned as bitmap and values: if that is less than all entries."""
    sent = candidates(unit.ranks, unit.compressed, codec.theta)
    return packed_bytes(unit.compressed) + VALUE_BYTES * sent < VALUE_BYTES * unit.compressed


def sent_bytes(unit: Unit, codec: CodecSizes, message: int, all_reduce: bool) -> int:
    """Return the bytes that one rank passes to the collectives of an exchange.

    Reductions count their input, gathers their output.

    Args:
        unit: Sizes of the exchange.
        codec: The codec.
        message: Bytes of the codec's message to one destination, verdict included.
        all_reduce: Whether every rank gets all sums.
    """
    w, m = unit.ranks, unit.compressed
    rest = VALUE_BYTES * unit.dense * (1 if all_reduce else w)
    if m == 0:
        return rest
    row = message
    if all_reduce and spreads_packed(unit, codec):
        row += packed_bytes(m) + VALUE_BYTES * candidates(w, m, codec.theta)
    elif all_reduce:
        row += VALUE_BYTES * m
    return w * row + rest
