# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes and memory of TSR-Adam: as its paper counts them, and with everything counted.

The *published* counting reproduces Tables 3 and 6. Its conventions: decimal gigabytes; 4 bytes per
element on the wire; no language-model head; one sketch of each side per refresh (no oversampling,
no power iteration); in a refresh step only the attention's cores count; the embedding refreshes
every second step (half of its sketch per step on average).

The *honest* counting includes every element sent between replicas: the head, oversampling p and
power iterations q, but no core in a refresh step, whose SVD yields it.
"""

from dataclasses import dataclass
from typing import Literal

from torchtitan_lr.formulas.parameters import (
    ModelShape,
    attention_sides,
    count_parameters,
    feed_forward_sides,
)
from torchtitan_lr.formulas.tsr_traffic import sketch_elements, sketch_width

Side = tuple[int, int]
"""Rows and columns of a matrix."""

BYTES = 4
"""Bytes per element on the wire: gradients and cores are sent in fp32."""

TSR_CELLS = {
    ("60M", 256, 64, 100): ("0.020", "0.10", "0.17"),
    ("130M", 384, 96, 100): ("0.058", "0.31", "0.45"),
    ("350M", 384, 128, 100): ("0.11", "0.79", "1.19"),
    ("1B", 512, 256, 100): ("0.21", "2.05", "3.81"),
    ("60M", 128, 64, 200): ("0.008", "0.05", "0.14"),
    ("130M", 256, 96, 50): ("0.032", "0.20", "0.38"),
    ("350M", 256, 128, 50): ("0.062", "0.52", "1.02"),
}
"""TSR-Adam, Tables 3 and 6 (its 40k-step row repeats the first), by model, r, r_e and K: decimal
GB per step on average, peak GB per step, and GB of memory."""

TSR_ADAMW_CELLS = {
    "60M": ("0.17", "0.17", "0.28"),
    "130M": ("0.44", "0.44", "0.71"),
    "350M": ("1.34", "1.34", "2.08"),
    "1B": ("5.09", "5.09", "7.77"),
}
"""AdamW in the same tables."""

TSR_GALORE_MEMORY = {
    "60M": (128, "0.21"),
    "130M": (256, "0.51"),
    "350M": (256, "1.26"),
    "1B": (512, "4.5"),
}
"""GaLore's rank and memory in these tables. We found no formula for its bytes and peaks."""


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


def linear_sides(shape: ModelShape) -> list[Side]:
    """Return the sides of all full-rank linears: attention first, then the feed-forward."""
    layers = shape.n_layers
    return attention_sides(shape) * layers + feed_forward_sides(shape) * layers


def published_tsr(shape: ModelShape, tsr: TSRShape) -> Cost:
    """Return TSR-Adam's cost as counted in Tables 3 and 6.

    With A = 4L, M = 3L, S = Σ(m + n)r, E = (V + d)·r_e and τ = r_e² + (2L + 1)d:
    average 4{[(K − 1)(A + M)r² + A·r² + S]/K + E/2 + τ}, peak 4{A·r² + S + E + τ},
    memory 2P + 4[(A + M)r² + τ] + 2S.

    Args:
        shape: A full-rank model.
        tsr: Ranks and interval; the conventions fix p, q, K_e and the head.
    """
    r, k = tsr.rank, tsr.interval
    attention, feed_forward = 4 * shape.n_layers, 3 * shape.n_layers
    cores = (attention + feed_forward) * r * r
    sketches = sum(m + n for m, n in linear_sides(shape)) * r
    embedding = (shape.vocab_size + shape.dim) * tsr.embedding_rank
    rest = tsr.embedding_rank**2 + _vectors(shape)
    refresh = attention * r * r + sketches
    return Cost(
        average=BYTES * (((k - 1) * cores + refresh) / k + embedding / 2 + rest),
        peak=BYTES * (refresh + embedding + rest),
        memory=2 * _parameters(shape) + BYTES * (cores + rest) + 2 * sketches,
    )


def published_adamw(shape: ModelShape) -> Cost:
    """Return AdamW's cost as counted in Table 3: 4(P − Vd) sent, 2P + 4(P − Vd) of memory."""
    counted = _parameters(shape) - shape.vocab_size * shape.dim
    sent = BYTES * counted
    return Cost(sent, sent, 2 * _parameters(shape) + sent)


def published_galore_memory(shape: ModelShape, rank: int) -> float:
    """Return GaLore's memory as counted in Table 3.

    It is 2P + 4[Σ r·max(m, n) + Vd + (2L + 1)d] + 2Σ r·min(m, n). We found no formula for its
    published traffic.
    """
    sides = linear_sides(shape)
    cores = sum(rank * max(side) for side in sides)
    dense = shape.vocab_size * shape.dim + _vectors(shape)
    bases = sum(rank * min(side) for side in sides)
    return 2 * _parameters(shape) + BYTES * (cores + dense) + 2 * bases


def honest_tsr(shape: ModelShape, tsr: TSRShape) -> Cost:
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


def honest_adamw(shape: ModelShape) -> Cost:
    """Return AdamW's cost with everything counted: 4P sent, 12P of memory in fp32."""
    parameters = _parameters(shape)
    return Cost(BYTES * parameters, BYTES * parameters, 3 * BYTES * parameters)


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
    sketch = sketch_elements(m, n, sketch_width(side, rank, tsr.oversampling), tsr.power_iterations)
    return {"sketch": sketch, "dense": m * n, "auto": min(sketch, m * n)}[tsr.refresh]


def _vectors(shape: ModelShape) -> int:
    return (2 * shape.n_layers + 1) * shape.dim


def _parameters(shape: ModelShape) -> int:
    return count_parameters(shape).total
