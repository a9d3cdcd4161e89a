# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a compressed gradient exchange sends, in closed form (TAGC).

Everywhere W is the number of ranks that exchange a gradient, m the compressed entries that each of
them owns afterwards, θ the share of entries that a rank does not send, and c the compression of the
count sketch. Sizes follow from these numbers alone, in exact fractions; nothing here is taken from
the codecs, so that a comparison with what they send can fail.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Protocol

from torchtitan_lr.formulas.traffic import Traffic


class CodecNumbers(Protocol):
    """What decides the sizes of a codec's messages; ``CodecSizes`` has these."""

    @property
    def name(self) -> str:
        """The codec's name, a key of `FORMULAS`."""

    @property
    def c(self) -> float:
        """Entries per cell of the sketch."""

    @property
    def theta(self) -> float:
        """Share θ of entries that is not sent."""

    @property
    def index(self) -> str:
        """``exact`` or ``sum1``."""


@dataclass(frozen=True)
class Exchange:
    """What W ranks exchange of one unit of the model.

    Args:
        ranks: Ranks W.
        compressed: Compressed entries m of each destination.
        dense: Entries that travel as they are: of each destination of a reduce-scatter, of the
            whole shard in an all-reduce.
    """

    ranks: int
    compressed: int
    dense: int = 0


def replicated(compressed: int, dense: int, ranks: int, codec: CodecNumbers) -> Exchange:
    """Return an all-reduce of a shard: each rank owns the W-th part of its compressed entries.

    Args:
        compressed: Compressed entries of the shard.
        dense: Its other entries.
        ranks: Ranks W.
        codec: Without compression all entries travel in one plain all-reduce.
    """
    if not leaves_residual(codec):
        return Exchange(ranks, 0, compressed + dense)
    return Exchange(ranks, ceil(Fraction(compressed, ranks)), dense)


def sent_entries(m: int, theta: float) -> int:
    """Entries of m that a rank sends: ⌊(1 − θ + 10⁻⁹)·m⌋, at least one; θ is a decimal number."""
    return floor(m * (1 - _decimal(theta) + Fraction(1, 10**9))) or 1


def index_bytes(m: int) -> int:
    """Bytes of m bits: ⌈m/8⌉."""
    return ceil(Fraction(m, 8))


def sketch_cells(m: int, c: float) -> int:
    """Cells of a sketch of three equal rows with at most c entries a cell: 3⌈m/(3c)⌉."""
    return 3 * ceil(m / (3 * _decimal(c)))


def verdict_bytes(m: int) -> int:
    """Bytes of the owner's verdict on m entries, a bit for each of at most 1024 equal blocks.

    Blocks of b = ⌈m/1024⌉ entries, eight of them to a byte: ⌈m/(8b)⌉, at most 128.
    """
    return ceil(Fraction(m, 8 * ceil(Fraction(m, 1024))))


def returned_entries(ranks: int, m: int, theta: float) -> int:
    """Entries of an owner's sum that may be other than zero: those that W ranks sent, at most m."""
    sent = ranks * sent_entries(m, theta)
    return sent if sent < m else m


def returns_packed(exchange: Exchange, codec: CodecNumbers) -> bool:
    """Whether a sum returns as bitmap and values: where the zeros outweigh the bitmap (4 bytes)."""
    m = exchange.compressed
    zeros = m - returned_entries(exchange.ranks, m, codec.theta)
    return index_bytes(m) < 4 * zeros


class CodecFormula:
    """What the formulas say of a codec, by the name under which the codec is registered.

    Attributes:
        leaves_residual: Whether a rank keeps what it does not send, a number for each entry.
    """

    leaves_residual = True

    def rows(
        self, exchange: Exchange, codec: CodecNumbers, scope: str, mesh_dim: str
    ) -> list[Traffic]:
        """Every collective of one reduce-scatter with m > 0 compressed entries, exactly."""
        raise NotImplementedError

    def can_be_decoded(self, codec: CodecNumbers, m: int, ranks: int) -> bool:
        """Whether an owner of m > 0 entries can decode what ``ranks`` > 1 ranks send."""
        return True


class DenseFormula(CodecFormula):
    """No compression: the plain reduce-scatter."""

    leaves_residual = False

    def rows(
        self, exchange: Exchange, codec: CodecNumbers, scope: str, mesh_dim: str
    ) -> list[Traffic]:
        """All entries, summed."""
        entries = exchange.ranks * (exchange.compressed + exchange.dense)
        return [_row(scope, "reduce_scatter", "gradient", entries, mesh_dim)]


class SparseFormula(CodecFormula):
    """A bitmap and the largest values."""

    def rows(
        self, exchange: Exchange, codec: CodecNumbers, scope: str, mesh_dim: str
    ) -> list[Traffic]:
        """Bitmaps and values, swapped; dense entries, summed."""
        w, m = exchange.ranks, exchange.compressed
        rows = [
            _row(scope, "all_to_all", "index", w * index_bytes(m), mesh_dim),
            _row(scope, "all_to_all", "gradient", w * sent_entries(m, codec.theta), mesh_dim),
        ]
        if exchange.dense:
            rows.append(_row(scope, "reduce_scatter", "gradient", w * exchange.dense, mesh_dim))
        return rows


class SketchFormula(CodecFormula):
    """TAGC's index and count sketch."""

    def rows(
        self, exchange: Exchange, codec: CodecNumbers, scope: str, mesh_dim: str
    ) -> list[Traffic]:
        """Return the index (swapped or summed), cells, dense entries and gathered verdicts."""
        w, m = exchange.ranks, exchange.compressed
        op = "all_to_all" if codec.index == "exact" else "reduce_scatter"
        summed = w * (sketch_cells(m, codec.c) + exchange.dense)
        return [
            _row(scope, op, "index", w * index_bytes(m), mesh_dim),
            _row(scope, "reduce_scatter", "gradient", summed, mesh_dim),
            _row(scope, "all_gather", "index", w * verdict_bytes(m), mesh_dim),
        ]

    def can_be_decoded(self, codec: CodecNumbers, m: int, ranks: int) -> bool:
        """Whether a destination's sketch has few enough unknowns for its cells.

        Unknowns are the entries that any of W ranks sends, k each, chosen independently:
        m·(1 − (1 − k/m)^W). With n cells in each of the three rows they may be at most
        3n·min(0.75, 0.818 − 1.2·n^(−2/3)): random hypergraphs of three-fold edges have a core from
        .818 on, and finite ones earlier, by a power of their size whose exponent is 2/3.
        """
        missed = 1 - sent_entries(m, codec.theta) / m
        unknowns = m - m * missed**ranks
        cells = sketch_cells(m, codec.c)
        share = min(0.75, 0.818 - 1.2 * (cells / 3) ** (-2 / 3))
        return unknowns <= (share + 1e-12) * cells


FORMULAS: dict[str, CodecFormula] = {}
"""Formulas by the name of their codec."""


def register_formula(name: str, formula: CodecFormula) -> None:
    """Make a codec known to the formulas."""
    FORMULAS[name] = formula


register_formula("dense", DenseFormula())
register_formula("sparse", SparseFormula())
register_formula("sketch", SketchFormula())


def leaves_residual(codec: CodecNumbers) -> bool:
    """Whether a rank that sends by this codec keeps what it does not send."""
    return FORMULAS[codec.name].leaves_residual


def can_be_decoded(codec: CodecNumbers, m: int, ranks: int) -> bool:
    """Whether a destination's message can be decoded, by its size.

    Args:
        codec: What was asked for.
        m: Compressed entries of the destination.
        ranks: Ranks W; one rank alone sends to itself.
    """
    return m == 0 or ranks == 1 or FORMULAS[codec.name].can_be_decoded(codec, m, ranks)


def reduce_scatter_traffic(
    exchange: Exchange, codec: CodecNumbers, scope: str, mesh_dim: str = "fsdp"
) -> list[Traffic]:
    """Every collective of one compressed reduce-scatter, exactly.

    Returns:
        Rows with the roles ``gradient`` and ``index`` (bytes).
    """
    formula = FORMULAS[codec.name] if exchange.compressed else DenseFormula()
    return formula.rows(exchange, codec, scope, mesh_dim)


def all_reduce_traffic(
    exchange: Exchange, codec: CodecNumbers, scope: str, mesh_dim: str = "dp_replicate"
) -> list[Traffic]:
    """Every collective of one compressed all-reduce: a reduce-scatter, then its result to all."""
    w, m, dense = exchange.ranks, exchange.compressed, exchange.dense
    if m == 0 or not leaves_residual(codec):
        return [_row(scope, "all_reduce", "gradient", w * m + dense, mesh_dim)]
    rows = reduce_scatter_traffic(Exchange(w, m), codec, scope, mesh_dim)
    returned = m
    if returns_packed(exchange, codec):
        rows.append(_row(scope, "all_gather", "index", w * index_bytes(m), mesh_dim))
        returned = returned_entries(w, m, codec.theta)
    rows.append(_row(scope, "all_gather", "gradient", w * returned, mesh_dim))
    if dense:
        rows.append(_row(scope, "all_reduce", "gradient", dense, mesh_dim))
    return rows


def _row(scope: str, op: str, role: str, elements: int, mesh_dim: str) -> Traffic:
    return Traffic(scope, "backward", op, role, 1, elements, mesh_dim)


def _decimal(number: float) -> Fraction:
    """Return a setting as the decimal number that was written, not as its nearest float."""
    return Fraction(str(number))
