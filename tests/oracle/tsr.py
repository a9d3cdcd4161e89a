# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes and memory of TSR-Adam, with everything counted.

Every element sent between replicas: the head, oversampling p and power iterations q, but no core in
a refresh step, whose SVD yields it.
"""

from dataclasses import dataclass
from typing import Literal

from tests.oracle.parameters import (
    attention_sides,
    count_parameters,
    feed_forward_sides,
)
from torchtitan_lr.models.args import LlamaArgs

Side = tuple[int, int]
"""Rows and columns of a matrix."""

BYTES = 4
"""Bytes per element on the wire: gradients and cores are sent in fp32."""


@dataclass(frozen=True)
class TSRShape:
    """Ranks and intervals of a TSR run.

    Args:
        rank: r of the linears.
        interval: K, steps between refreshes.
        embedding_rank: r_e; 0 leaves the embedding dense.
        embedding_interval: K_e.
        oversampling: p, additional columns of a sketch.
        power_iterations: q.
        compress_head: Whether the head is compressed like the linears.
        refresh: What a refresh sends: ``sketch``, ``dense``, or the cheaper per matrix (``auto``).
    """

    rank: int
    interval: int = 100
    embedding_rank: int = 0
    embedding_interval: int = 2
    oversampling: int = 5
    power_iterations: int = 1
    compress_head: bool = False
    refresh: Literal["auto", "sketch", "dense"] = "sketch"


@dataclass(frozen=True)
class Cost:
    """Bytes of a run.

    Args:
        average: Sent per step, averaged over a run.
        peak: Sent in the most expensive step, when all matrices refresh.
        memory: Weights and optimizer state.
    """

    average: float
    peak: float
    memory: float


def linear_sides(shape: LlamaArgs) -> list[Side]:
    """Return the sides of all full-rank linears: attention first, then the feed-forward."""
    layers = shape.n_layers
    return attention_sides(shape) * layers + feed_forward_sides(shape) * layers


def honest_tsr(shape: LlamaArgs, tsr: TSRShape) -> Cost:
    """Return TSR-Adam's cost with everything counted; weights, moments and bases in fp32.

    Args:
        shape: A full-rank model.
        tsr: Ranks, intervals and refresh settings.
    """
    groups = [(side, tsr.rank, tsr.interval) for side in linear_sides(shape)]
    dense = _vectors(shape)
    table = (shape.vocab_size, shape.dim)
    if tsr.compress_head:
        groups.append((table, tsr.rank, tsr.interval))
    else:
        dense += shape.vocab_size * shape.dim
    if tsr.embedding_rank:
        groups.append((table, tsr.embedding_rank, tsr.embedding_interval))
    else:
        dense += shape.vocab_size * shape.dim
    average, peak = float(dense), dense
    state = 2 * dense
    for side, rank, interval in groups:
        refresh = refresh_elements(side, rank, tsr)
        average += (rank * rank * (interval - 1) + refresh) / interval
        peak += refresh
        state += 2 * rank * rank + sum(side) * rank
    return Cost(BYTES * average, BYTES * peak, BYTES * (_parameters(shape) + state))


def refresh_elements(side: Side, rank: int, tsr: TSRShape) -> int:
    """Return the elements that one matrix sends in a refresh.

    A sketch of width k = r + p costs (1 + q)(m + n)k: Y (m, k) and B (k, n), and for each power
    iteration Z (n, k) and Y again.

    Args:
        side: m and n.
        rank: r.
        tsr: p, q and the choice between sketch and dense.
    """
    m, n = side
    width = min(rank + tsr.oversampling, m, n)
    sketch = (1 + tsr.power_iterations) * (m + n) * width
    return {"sketch": sketch, "dense": m * n, "auto": min(sketch, m * n)}[tsr.refresh]


def _vectors(shape: LlamaArgs) -> int:
    return (2 * shape.n_layers + 1) * shape.dim


def _parameters(shape: LlamaArgs) -> int:
    return count_parameters(shape).total
