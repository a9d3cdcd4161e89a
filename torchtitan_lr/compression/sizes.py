# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The sizes of an exchange that do not depend on the codec (TAGC).

Everywhere W is the number of ranks that exchange a gradient, m the compressed entries that each of
them owns afterwards, θ the share of entries that a rank does not send, and c the compression of the
count sketch. What a codec adds stands on its page in ``codecs/``; ``formulas/compression.py``
states the same sizes on its own, and the ledger's comparison shows any difference.
"""

import math
from dataclasses import dataclass

LEVELS: dict[str, tuple[float, float]] = {"2x": (2, 0.8), "4x": (4, 0.9), "10x": (10, 0.9875)}
"""Compression c and sparsity θ of the published levels (TAGC, Table 1)."""

VALUE_BYTES = 4
"""Bytes of an entry; gradients are exchanged in fp32."""

VERDICT_BITS = 1024
"""Blocks per destination, at most, whose decoding the owner vouches for one by one."""


@dataclass(frozen=True)
class CodecSizes:
    """What decides the sizes of a codec's messages.

    Args:
        name: Of the codec, as it is registered.
        c: Entries per cell of the sketch.
        theta: Share of entries that is not sent.
        index: ``exact``, ``sum1`` or ``sum4``: how the sketch's owner learns what was sent.
    """

    name: str
    c: float = 1.0
    theta: float = 0.0
    index: str = "exact"


DENSE = CodecSizes("dense")
"""What travels uncompressed, by the codecs' path."""


@dataclass(frozen=True)
class Unit:
    """One exchange: a reduce-scatter of W rows.

    Args:
        ranks: Ranks W.
        compressed: Compressed entries m of each destination.
        dense: Entries of each destination that travel as they are.
    """

    ranks: int
    compressed: int
    dense: int = 0


def exchange_unit(compressed: int, dense: int, ranks: int, lossy: bool, all_reduce: bool) -> Unit:
    """Return the exchange of a unit of the model.

    Args:
        compressed: Compressed entries of a destination; of the whole shard where all ranks need
            the sums.
        dense: The other entries, likewise.
        ranks: Ranks W.
        lossy: Whether the codec can leave anything unsent.
        all_reduce: Whether every rank needs the whole sum.
    """
    if not all_reduce:
        return Unit(ranks, compressed, dense)
    if not (lossy and compressed):
        return Unit(ranks, 0, dense + compressed)  # one plain all-reduce
    return Unit(ranks, -(-compressed // ranks), dense)


def kept_entries(m: int, theta: float) -> int:
    """Entries of m that are sent so that at least a share θ is not; at least one."""
    # The small number: 0.9·10 is a little more than 9 in floating point.
    return max(1, m - math.ceil(theta * m - 1e-9 * m))


def packed_bytes(m: int, bits: int = 1) -> int:
    """Bytes of an index of m entries at ``bits`` bits each."""
    return -(-m * bits // 8)


def verdict_block(m: int) -> int:
    """Consecutive entries that share one bit of the owner's verdict."""
    return -(-m // VERDICT_BITS)


def candidates(ranks: int, m: int, theta: float) -> int:
    """Most entries of one destination that any rank may have sent."""
    return min(m, ranks * kept_entries(m, theta))


def spreads_packed(unit: Unit, codec: CodecSizes) -> bool:
    """Whether a sum travels back as bitmap and values: where that is less than all entries."""
    sent = candidates(unit.ranks, unit.compressed, codec.theta)
    return packed_bytes(unit.compressed) + VALUE_BYTES * sent < VALUE_BYTES * unit.compressed


def sent_bytes(unit: Unit, codec: CodecSizes, message: int, all_reduce: bool) -> int:
    """Bytes that one rank hands to the collectives of an exchange, once per call.

    A reduction counts what goes in, a gather what comes out.

    Args:
        unit: Sizes.
        codec: What travels.
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
