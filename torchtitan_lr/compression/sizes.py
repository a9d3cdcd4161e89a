# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a compressed exchange sends, and when a count sketch can be decoded (TAGC).

W is the number of ranks that exchange a gradient, m the number of compressed entries that each owns
afterwards, θ the share of unsent entries of a rank, and c the compression of the count sketch.
Nothing here needs torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

# Compression c and sparsity θ of the published levels (TAGC, Table 1).
LEVELS: dict[str, tuple[float, float]] = {"2x": (2, 0.8), "4x": (4, 0.9), "10x": (10, 0.9875)}

FAILURE_BITS = 1024  # the most blocks per destination of which an owner says if they failed
HASH_ROWS = 3  # of the count sketch
PEELING_LIMIT = 0.75  # largest accepted c·(union density); peeling fails between .78 and .82
SHARP_LIMIT = 0.818  # load at which peeling fails in an infinitely large sketch of three rows

# A small sketch fails earlier: at `SHARP_LIMIT` minus this times row^(-2/3). At that load 3 to 9%
# of the entries remain, on 2 to 8 ranks with 3 or more cells per row (measured). From 75 cells on,
# `PEELING_LIMIT` is the smaller limit, and fewer entries remain.
SMALL_SKETCH = 1.2


@dataclass(frozen=True)
class CodecSizes:
    """The parameters that determine the sizes of a codec's messages."""

    name: str  # in `FORMULAS`
    c: float = 1.0  # entries per cell of the sketch
    theta: float = 0.0  # share of unsent entries
    half: bool = False  # whether values travel in bf16, not in the gradients' own fp32

    @property
    def value_bytes(self) -> int:
        """Bytes of a value; an element of an index is one byte."""
        return 2 if self.half else 4


@dataclass(frozen=True)
class Unit:
    """Sizes of the exchange of one unit of the model among W ranks."""

    ranks: int
    compressed: int  # entries m of each destination
    dense: int = 0  # of each destination of a reduce-scatter, of the whole shard in an all-reduce


# Collectives on one rank: operation, role (``index`` or ``gradient``) and elements, of the input
# of a reduction or the output of a gather.
Rows = list[tuple[str, str, int]]


@dataclass(frozen=True)
class CodecFormula:
    """What a codec sends."""

    # The collectives of `codecs.exchange`, and the gather of failed blocks if the codec can fail.
    # Dense entries are not in them.
    messages: Callable[[Unit, CodecSizes], Rows]
    sends_all: bool = False  # whether a rank sends every entry, so that ``theta`` has no effect
    rounds: bool = False  # whether the codec can send its values in bf16 (`CodecSizes.half`)


def sparse_messages(unit: Unit, codec: CodecSizes) -> Rows:
    """Return a bitmap and values."""
    w, m = unit.ranks, unit.compressed
    return [
        ("all_to_all", "index", w * -(-m // 8)),
        ("all_to_all", "gradient", w * kept_entries(m, codec.theta)),
    ]


def sketch_messages(unit: Unit, codec: CodecSizes) -> Rows:
    """Return an index, the cells, and the blocks that failed."""
    w, m = unit.ranks, unit.compressed
    blocks = -(-m // failure_block(m))
    return [
        ("all_to_all", "index", w * -(-m // 8)),
        # Cells in bf16 are added by their owner, in fp32.
        (
            "all_to_all" if codec.half else "reduce_scatter",
            "gradient",
            w * HASH_ROWS * sketch_row(m, codec.c),
        ),
        ("all_gather", "index", w * -(-blocks // 8)),
    ]


FORMULAS = {
    "sparse": CodecFormula(sparse_messages, rounds=True),
    "sketch": CodecFormula(sketch_messages, rounds=True),
}


def exchange_unit(
    codec: CodecSizes, compressed: int, dense: int, ranks: int, all_reduce: bool
) -> Unit:
    """Return the sizes of a unit's exchange; all is dense if a sketch could not be decoded."""
    # Entries are those of a destination, or of the whole shard for `all_reduce`, of which each rank
    # owns a W-th part. An owner must decode all but a few percent of what W independent ranks send
    # it. In a small sketch, entries form an undecodable loop at lower loads (finite-size scaling of
    # random hypergraphs, with exponent 2/3).
    m = -(-compressed // ranks) if all_reduce else compressed
    if codec.name == "sketch" and m > 0 and ranks > 1:
        row = sketch_row(m, codec.c)
        unknown = m * (1 - (1 - kept_entries(m, codec.theta) / m) ** ranks)
        limit = min(PEELING_LIMIT, SHARP_LIMIT - SMALL_SKETCH * row ** (-2 / 3))
        if unknown / (HASH_ROWS * row) > limit + 1e-12:
            return Unit(ranks, 0, dense + compressed)
    return Unit(ranks, m, dense)


def kept_entries(m: int, theta: float) -> int:
    """Return the number of sent entries of m: at most a share 1 − θ, at least one."""
    # The small number because 0.9·10 is slightly more than 9 in floating point.
    return max(1, m - math.ceil(theta * m - 1e-9 * m))


def sketch_row(m: int, c: float) -> int:
    """Return the cells in each of the three rows of a sketch: ⌈⌈m/c⌉ / 3⌉."""
    return -(-math.ceil(m / c) // HASH_ROWS)


def failure_block(m: int) -> int:
    """Return the number of consecutive entries per bit of `Decoded.failed`."""
    return -(-m // FAILURE_BITS)


def candidates(ranks: int, m: int, theta: float) -> int:
    """Return the largest number of distinct entries that W ranks can send to one destination."""
    return min(m, ranks * kept_entries(m, theta))


def returned_entries(unit: Unit, codec: CodecSizes) -> int:
    """Return the entries of each owner's sums that go back to all ranks."""
    # These are the entries that can differ from zero, if with a bitmap they are less than all m.
    m, value = unit.compressed, codec.value_bytes
    sent = candidates(unit.ranks, m, codec.theta)
    return sent if -(-m // 8) + value * sent < value * m else m


def exchange_traffic(unit: Unit, codec: CodecSizes, all_reduce: bool = False) -> Rows:
    """Return every collective of an exchange on one rank; all get all sums for `all_reduce`."""
    w, m = unit.ranks, unit.compressed
    if m == 0:
        plain = ("all_reduce", 1) if all_reduce else ("reduce_scatter", w)
        return [(plain[0], "gradient", plain[1] * unit.dense)]
    rows = FORMULAS[codec.name].messages(unit, codec)
    if not all_reduce:
        return _with_dense(rows, w * unit.dense) if unit.dense else rows
    returned = returned_entries(unit, codec)
    if returned < m:
        rows.append(("all_gather", "index", w * -(-m // 8)))
    rows.append(("all_gather", "gradient", w * returned))
    return [*rows, ("all_reduce", "gradient", unit.dense)] if unit.dense else rows


def _with_dense(rows: Rows, dense: int) -> Rows:
    """Add the dense entries of a reduce-scatter: to the codec's own, if it has one."""
    for i, (op, role, elements) in enumerate(rows):
        if op == "reduce_scatter":
            return [*rows[:i], (op, role, elements + dense), *rows[i + 1 :]]
    return [*rows, ("reduce_scatter", "gradient", dense)]


def sent_bytes(unit: Unit, codec: CodecSizes, all_reduce: bool = False) -> int:
    """Return the bytes of `exchange_traffic`."""
    role_bytes = {"index": 1, "gradient": codec.value_bytes}
    return sum(role_bytes[role] * n for _, role, n in exchange_traffic(unit, codec, all_reduce))


def bits_per_entry(codec: CodecSizes, replicas: int = 0) -> float:
    """Return the bits per compressed entry and rank in a large tensor."""
    # That is 1 + b(1 − θ) for the sparse codec and 1 + b/c for the sketch, with values of b = 32 or
    # 16 bits. The sums that return to HSDP's W ``replicas`` add min(b, 1 + b·W(1 − θ)); W is 0 for
    # FSDP's reduce-scatter.
    large = Unit(max(1, replicas), 10**9)
    sent = sent_bytes(large, codec, all_reduce=replicas > 0)
    return 8 * sent / (large.ranks * large.compressed)


def peels(c: float, theta: float, ranks: int) -> bool:
    """Return whether a large sketch of compression c decodes: c·(1 − θ^W) ≤ 0.75."""
    # 1 − θ^W is the share of entries that any of W independent ranks sends.
    # A theta that is the smallest one but for rounding counts as peeling.
    return c * (1 - theta**ranks) <= PEELING_LIMIT + 1e-12


def smallest_theta(c: float, ranks: int) -> float:
    """Return the smallest θ at which a sketch of compression c decodes, rounded up."""
    # The steps are 0.0001, or a tenth of 1 − θ if that is less, with many ranks.
    if peels(c, 0.0, ranks):
        return 0.0
    exact = (1 - PEELING_LIMIT / c) ** (1 / ranks)
    # A step of a tenth leaves 1 − θ two digits with any number of ranks.
    step = min(1e-4, 10.0 ** (math.floor(math.log10(1 - exact)) - 1))
    theta = round(math.ceil(exact / step - 1e-6) * step, 12)
    return theta if peels(c, theta, ranks) else round(theta + step, 12)
