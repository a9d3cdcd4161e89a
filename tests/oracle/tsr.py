# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes that TSR-Adam sends, with everything counted.

Every element sent between replicas: the head, oversampling p and power iterations q, but no core in
a refresh step, whose SVD yields it.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from tests.oracle.parameters import attention_sides, feed_forward_sides
from torchtitan_lr.models.args import LlamaArgs

Side = tuple[int, int]
"""Rows and columns of a matrix."""

BYTES = 4
"""Bytes per element on the wire: gradients and cores are sent in fp32."""


@dataclass(frozen=True)
class TSRShape:
    """Ranks and interval of a TSR run; the head is not compressed."""

    rank: int
    embedding_rank: int
    interval: int
    oversampling: int = 5
    power_iterations: int = 1
    refresh: Literal["auto", "sketch", "dense"] = "sketch"


def linear_sides(shape: LlamaArgs) -> list[Side]:
    """Return the sides of all full-rank linears: attention first, then the feed-forward."""
    layers = shape.n_layers
    return attention_sides(shape) * layers + feed_forward_sides(shape) * layers


def honest_tsr(shape: LlamaArgs, tsr: TSRShape) -> tuple[float, float]:
    """Return the bytes that TSR-Adam sends per step, with everything counted."""
    table = (shape.vocab_size, shape.dim)
    groups = [(side, tsr.rank) for side in linear_sides(shape)] + [(table, tsr.embedding_rank)]
    # The vectors of all norms, and the head.
    dense = (2 * shape.n_layers + 1) * shape.dim + shape.vocab_size * shape.dim
    average, peak = float(dense), dense
    for side, rank in groups:
        refresh = refresh_elements(side, rank, tsr)
        average += (rank * rank * (tsr.interval - 1) + refresh) / tsr.interval
        peak += refresh
    return BYTES * average, BYTES * peak


def refresh_elements(side: Side, rank: int, tsr: TSRShape) -> int:
    """Return the elements that one matrix sends in a refresh.

    A sketch of width k = r + p costs (1 + q)(m + n)k: Y (m, k) and B (k, n), and for each power
    iteration Z (n, k) and Y again.
    """
    m, n = side
    width = min(rank + tsr.oversampling, m, n)
    sketch = (1 + tsr.power_iterations) * (m + n) * width
    return {"sketch": sketch, "dense": m * n, "auto": min(sketch, m * n)}[tsr.refresh]


def gathered_elements(rows: int, width: int, ranks: int) -> int:
    """Return a rank's elements after a QR's gather: of padded rows (m, k), or triangles (k, k)."""
    return ranks * min(ceil(rows / ranks), width) * width
