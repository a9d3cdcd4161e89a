# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Message sizes of TSR-Adam: sketch width, dense refreshes, blocks and buckets.

`formulas/tsr.py` and `formulas/tsr_traffic.py` state the same sizes independently, from the paper,
and import nothing from here. A mistake here therefore shows up as a difference between measured and
predicted bytes.
"""

from collections.abc import Iterable, Sequence

BUCKET_ELEMENTS = 2**26
"""Elements of a bucket of dense gradients, and of the sketches in memory at a time."""


def sketch_width(rows: int, columns: int, rank: int, oversampling: int) -> int:
    """Return k = min(r + p, m, n), the columns of a sketch (TSR-Adam, Algorithm 1).

    Args:
        rows: m.
        columns: n.
        rank: r.
        oversampling: p.
    """
    return min(rank + oversampling, rows, columns)


def largest_block(size: int, ranks: Iterable[int]) -> int:
    """Return the rows (or columns) of the largest block of a split matrix.

    Args:
        size: Rows (or columns) of the whole matrix.
        ranks: Size of each mesh dimension that splits it, in the mesh's order.
    """
    for count in ranks:
        size = (size + count - 1) // count
    return size


def refresh_is_dense(
    rows: int, columns: int, width: int, power_iterations: int, refresh: str
) -> bool:
    """Return whether a refresh sums dense gradients, not sketches, over the replicas.

    The sketches are Y (m, k) and B (k, n), plus Z (n, k) and Y again for each power iteration.

    Args:
        rows: m of a rank's largest block.
        columns: n of that block.
        width: k.
        power_iterations: q.
        refresh: ``sketch``, ``dense``, or ``auto`` for the one that sends less.
    """
    if refresh != "auto":
        return refresh == "dense"
    sketches = (1 + power_iterations) * (rows + columns) * width
    return rows * columns <= sketches


def split_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split a list into consecutive buckets of at most ``limit`` elements, or one larger entry.

    Args:
        sizes: Elements of each entry.
        limit: Elements of a bucket.
    """
    result: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not result or size > room:
            result.append([])
            room = limit
        result[-1].append(index)
        room -= size
    return result
