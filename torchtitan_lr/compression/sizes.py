# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The sizes that gradient compression sends, and where its sketch can be decoded (TAGC).

Everywhere W is the number of ranks that exchange a gradient, m the compressed entries that each of
them owns afterwards, θ the share of entries that a rank does not send, and c the compression of the
count sketch. The codecs send what these functions say; ``formulas/compression.py`` states the same
sizes on its own, and the ledger's comparison shows any difference.
"""

import math
from dataclasses import dataclass

LEVELS: dict[str, tuple[float, float]] = {"2x": (2, 0.8), "4x": (4, 0.9), "10x": (10, 0.9875)}
"""Compression c and sparsity θ of the published levels (TAGC, Table 1)."""

VALUE_BYTES = 4
"""Bytes of an entry; gradients are exchanged in fp32."""

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

VERDICT_BITS = 1024
"""Blocks per destination, at most, whose decoding the owner vouches for one by one."""

THETA_STEP = 1e-4
"""Sparsities are named in steps of this, or less."""


@dataclass(frozen=True)
class CodecSizes:
    """What decides the sizes of a codec's messages.

    Args:
        name: ``dense``, ``sparse`` or ``sketch``.
        c: Entries per cell of the sketch.
        theta: Share of entries that is not sent.
        index: ``exact``, ``sum1`` or ``sum4``: how the sketch's owner learns what was sent.
    """

    name: str
    c: float = 1.0
    theta: float = 0.0
    index: str = "exact"

    @property
    def index_bits(self) -> int:
        """Bits of the index per entry."""
        return 4 if self.index == "sum4" else 1


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


def exchange_unit(
    compressed: int, dense: int, ranks: int, codec: CodecSizes, all_reduce: bool
) -> Unit:
    """Return the exchange of a unit of the model.

    Args:
        compressed: Compressed entries of a destination; of the whole shard where all ranks need
            the sums.
        dense: The other entries, likewise.
        ranks: Ranks W.
        codec: What travels.
        all_reduce: Whether every rank needs the whole sum.
    """
    if not all_reduce:
        return Unit(ranks, compressed, dense)
    if codec.name == "dense" or not compressed:
        return Unit(ranks, 0, dense + compressed)  # one plain all-reduce
    return Unit(ranks, -(-compressed // ranks), dense)


def kept_entries(m: int, theta: float) -> int:
    """Entries of m that are sent so that at least a share θ is not; at least one."""
    # The small number: 0.9·10 is a little more than 9 in floating point.
    return max(1, m - math.ceil(theta * m - 1e-9 * m))


def packed_bytes(m: int, bits: int = 1) -> int:
    """Bytes of an index of m entries at ``bits`` bits each."""
    return -(-m * bits // 8)


def sketch_row(m: int, c: float) -> int:
    """Cells in each of the three rows of a sketch: ⌈⌈m/c⌉ / 3⌉."""
    return -(-math.ceil(m / c) // HASH_ROWS)


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


def sent_bytes(unit: Unit, codec: CodecSizes, all_reduce: bool) -> int:
    """Bytes that one rank hands to the collectives of an exchange, once per call.

    A reduction counts what goes in, a gather what comes out.

    Args:
        unit: Sizes.
        codec: What travels.
        all_reduce: Whether every rank gets all sums.
    """
    w, m = unit.ranks, unit.compressed
    rest = VALUE_BYTES * unit.dense * (1 if all_reduce else w)
    if m == 0 or codec.name == "dense":
        return VALUE_BYTES * w * m + rest
    row = packed_bytes(m, codec.index_bits)
    if codec.name == "sparse":
        row += VALUE_BYTES * kept_entries(m, codec.theta)
    else:
        row += VALUE_BYTES * HASH_ROWS * sketch_row(m, codec.c)
        row += packed_bytes(-(-m // verdict_block(m)))
    if all_reduce and spreads_packed(unit, codec):
        row += packed_bytes(m) + VALUE_BYTES * candidates(w, m, codec.theta)
    elif all_reduce:
        row += VALUE_BYTES * m
    return w * row + rest


def codec_bits(codec: CodecSizes, replicas: int = 0) -> dict[str, float]:
    """Bits per parameter and rank by operation in the limit of large tensors, fp32 values.

    Sketch: 1 + 32/c (index, cells); sparse: 1 + 32(1 − θ) (index, values). The owner's verdict
    on a sketch is 128 bytes a destination whatever its size, nothing in this limit. Where every
    replica needs the sum, the owners' sums travel back: as bitmap and values, of which there may
    be a share W(1 − θ), or whole where that is less: min(32, 1 + 32·W(1 − θ)).

    Args:
        codec: What travels.
        replicas: HSDP's replicas W, whose shards are all-reduced; 0 for FSDP's reduce-scatter.
    """
    if codec.name == "dense":
        return {"values": 32.0}
    if codec.name == "sparse":
        bits = {"index": 1.0, "values": 32 * (1 - codec.theta)}
    else:
        bits = {"index": float(codec.index_bits), "sketch": 32 / codec.c}
    if replicas:
        bits["returned"] = min(32.0, 1 + 32 * replicas * (1 - codec.theta))
    return bits


def union_density(ranks: int, theta: float) -> float:
    """Share of entries sent by any of W ranks, where they choose independently: 1 − θ^W."""
    return float(1 - theta**ranks)


def peels(c: float, theta: float, ranks: int) -> bool:
    """Return whether a large sketch of compression c decodes: c·(1 − θ^W) ≤ 0.75.

    `unit_codec` decides for the sizes of one unit.
    """
    return c * union_density(ranks, theta) <= PEELING_LIMIT + 1e-12


def unit_load(m: int, codec: CodecSizes, ranks: int) -> float:
    """Unknowns for each cell of one destination's sketch, where ranks choose independently.

    The whole entries and cells of a real exchange: of m entries each rank sends at least one, and
    a row of the sketch has at least one cell, so that a small unit's load is above c·(1 − θ^W).

    Args:
        m: Compressed entries of the destination.
        codec: A sketch.
        ranks: Ranks W.
    """
    unsent = (1 - kept_entries(m, codec.theta) / m) ** ranks
    return m * (1 - unsent) / (HASH_ROWS * sketch_row(m, codec.c))


def load_limit(m: int, codec: CodecSizes) -> float:
    """Largest load at which a sketch of m entries peels but for a few percent of them.

    Whether three cells hold a loop of entries is a matter of luck: in a small sketch it happens at
    lower loads (finite-size scaling of random hypergraphs, whose exponent is 2/3).
    """
    early = SMALL_SKETCH * sketch_row(m, codec.c) ** (-2 / 3)
    return min(PEELING_LIMIT, SHARP_LIMIT - early)


def unit_codec(codec: CodecSizes, compressed: int, ranks: int, all_reduce: bool) -> CodecSizes:
    """Return what a unit's gradients travel by: dense where a sketch of its size does not peel.

    Arguments as of `exchange_unit`.
    """
    m = -(-compressed // ranks) if all_reduce else compressed
    if codec.name != "sketch" or m == 0 or ranks == 1:
        return codec
    peels_here = unit_load(m, codec, ranks) <= load_limit(m, codec) + 1e-12
    return codec if peels_here else CodecSizes("dense")


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
