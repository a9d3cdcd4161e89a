# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a compressed gradient exchange sends (TAGC), stated a second time, in exact fractions.

W is the number of ranks, m the compressed entries that each of them owns afterwards, θ the share of
entries that a rank does not send, and c the compression of the count sketch. Nothing here is taken
from the codecs or their sizes, so that a comparison with what they send can fail.
"""

from fractions import Fraction
from math import ceil, floor
from typing import Any

from torchtitan_lr.costs.messages import Traffic


def sent_entries(m: int, theta: float) -> int:
    """Entries of m that a rank sends: ⌊(1 − θ + 10⁻⁹)·m⌋, at least one; θ is a decimal number."""
    return floor(m * (1 - _decimal(theta) + Fraction(1, 10**9))) or 1


def index_bytes(m: int) -> int:
    """Bytes of m bits: ⌈m/8⌉."""
    return ceil(Fraction(m, 8))


def sketch_cells(m: int, c: float) -> int:
    """Cells of a sketch of three equal rows with at most c entries a cell: 3⌈m/(3c)⌉."""
    return 3 * ceil(m / (3 * _decimal(c)))


def failure_bytes(m: int) -> int:
    """Bytes of an owner's `failed` bits for m entries, one for each of at most 1024 equal blocks.

    Blocks of b = ⌈m/1024⌉ entries, eight of them to a byte: ⌈m/(8b)⌉, at most 128.
    """
    return ceil(Fraction(m, 8 * ceil(Fraction(m, 1024))))


def can_be_decoded(c: float, theta: float, m: int, ranks: int) -> bool:
    """Whether a destination's sketch has few enough unknowns for its cells.

    Unknowns are the entries that any of W ranks sends, k each, chosen independently:
    m·(1 − (1 − k/m)^W). With n cells in each of the three rows they may be at most
    3n·min(0.75, 0.818 − 1.2·n^(−2/3)): random hypergraphs of three-fold edges have a core from
    .818 on, and finite ones earlier, by a power of their size whose exponent is 2/3.
    """
    missed = 1 - sent_entries(m, theta) / m
    cells = sketch_cells(m, c)
    share = min(0.75, 0.818 - 1.2 * (cells / 3) ** (-2 / 3))
    return m - m * missed**ranks <= (share + 1e-12) * cells


def exchange_rows(
    codec: Any, ranks: int, compressed: int, dense: int, scope: str, all_reduce: bool
) -> list[Traffic]:
    """Every collective of one exchange."""
    w, m = ranks, ceil(Fraction(compressed, ranks)) if all_reduce else compressed
    found: list[tuple[str, str, int]] = []
    if m and codec.name == "sketch":
        found.append(("all_to_all", "index", w * index_bytes(m)))
        # In bf16 the owner adds the cells, in fp32.
        op = "all_to_all" if codec.half else "reduce_scatter"
        found.append((op, "gradient", w * sketch_cells(m, codec.c)))
        found.append(("all_gather", "index", w * failure_bytes(m)))
    elif m:
        found.append(("all_to_all", "index", w * index_bytes(m)))
        found.append(("all_to_all", "gradient", w * sent_entries(m, codec.theta)))
    if m and all_reduce:
        nonzero = min(m, w * sent_entries(m, codec.theta))
        value = 2 if codec.half else 4
        packed = index_bytes(m) < value * (m - nonzero)  # the zeros outweigh the bitmap
        found += [("all_gather", "index", w * index_bytes(m))] if packed else []
        found.append(("all_gather", "gradient", w * (nonzero if packed else m)))
    if dense and all_reduce:
        found.append(("all_reduce", "gradient", dense))
    elif dense:
        sums = [i for i, row in enumerate(found) if row[0] == "reduce_scatter"]
        cells = found.pop(sums[0])[2] if sums else 0  # one call for the cells and the others
        found.append(("reduce_scatter", "gradient", cells + w * dense))
    mesh_dim = "dp_replicate" if all_reduce else "fsdp"
    return [Traffic(scope, "backward", op, role, 1, n, mesh_dim) for op, role, n in found]


def _decimal(number: float) -> Fraction:
    """Return a setting as the decimal number that was written, not as its nearest float."""
    return Fraction(str(number))
