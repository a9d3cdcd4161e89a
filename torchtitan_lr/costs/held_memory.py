# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Exact memory of a rank's parameters, gradients and optimizer state, in closed form.

FSDP2 splits a parameter, or what tensor parallelism left of it, into pieces of ceil(rows / ranks)
rows: the first rank has most, the last may have none. A spectral optimizer's A split by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_lr.optim.tsr.selection import MatrixPlan

Shape = tuple[int, ...]
NamedShapes = Mapping[str, Shape]

ADAM_MOMENTS = 2  # AdamW's state elements per parameter element

STEP_BYTES = 4
"""A step counter, an fp32 scalar: AdamW has one per tensor, TSR-Adam one per model part."""

COUNTER_BYTES = 8  # bytes of an int64 counter; TSR-Adam counts the refreshes of each matrix


@dataclass(frozen=True)
class Precision:
    """Bytes per element."""

    parameter: int = 4  # stored weights, their gradients and moments (``training.dtype``)
    compute: int = 2  # gathered weights and activations (``training.mixed_precision_param``)
    reduce: int = 4  # FSDP2's gradients on the wire (``training.mixed_precision_reduce``)

    @property
    def summed(self) -> int:
        """Whole gradients that are added up over micro-batches."""
        return max(4, self.compute)


def static_memory(
    parameters: Iterable[NamedShapes],
    shard: int,
    precision: Precision,
    state_bytes: Callable[[NamedShapes], int] | None = None,
    shard_rank: int = 0,
    by_columns: Collection[str] = (),
) -> dict[str, int]:
    """Return the bytes that a rank holds during the whole run, without buffers.

    `parameters` are shapes on this tensor-parallel rank, for each of its model parts; `state_bytes`
    counts an optimizer's states from a rank's pieces, by default AdamW's.
    """
    pieces = {}
    for part in parameters:
        for name, shape in part.items():
            pieces[name] = sharded(shape, shard, shard_rank, int(name in by_columns))
    weights = precision.parameter * sum(map(prod, pieces.values()))
    state = adam_state(pieces, precision.parameter) if state_bytes is None else state_bytes(pieces)
    return {"weights": weights, "gradients": weights, "optimizer": state}


def adam_state(pieces: NamedShapes, size: int) -> int:
    """Return the bytes of AdamW's moments, of ``size`` bytes an element, and of its counters."""
    return sum(STEP_BYTES + ADAM_MOMENTS * size * prod(piece) for piece in pieces.values())


def tsr_state(pieces: NamedShapes, size: int, plans: Mapping[str, MatrixPlan]) -> int:
    """Return the bytes of TSR-Adam's states; one optimizer has all model parts of a rank.

    A compressed matrix has U (m, r) and V (n, r), sharded like its rows and columns, and two
    moments (r, r); with one-sided projection U and two moments (r, n). Others have AdamW's moments.
    """
    total = STEP_BYTES
    for name, piece in pieces.items():
        moments, plan = prod(piece), plans.get(name)
        if plan is not None:
            m, n = reversed(piece) if plan.transposed else piece
            moments = plan.core_elements(n)
            total += COUNTER_BYTES + size * plan.rank * (m + n * plan.two_sided)
        total += ADAM_MOMENTS * size * moments
    return total


def spectral_state(pieces: NamedShapes, size: int, vectors: Mapping[str, int]) -> int:
    """Return the bytes of momenta, and of a vector of so many elements for each matrix."""
    return sum(size * (prod(piece) + vectors[name]) for name, piece in pieces.items())


def sharded(shape: Shape, ranks: int, rank: int = 0, dim: int = 0) -> Shape:
    """Return the shape of an FSDP rank's piece of a tensor that is split along a dimension."""
    length = -(-shape[dim] // ranks)
    piece = list(shape)
    piece[dim] = max(0, min(length, shape[dim] - rank * length))
    return tuple(piece)


def gathered_unit_bytes(
    units: Iterable[NamedShapes], head: NamedShapes | None, reshards: bool, precision: Precision
) -> int:
    """Return the peak bytes of FSDP2's gathered weights and of the gradients in reduction.

    With resharding these are the weights of the head (first in backward, so kept) or one more
    block, of the running block and of the prefetched one, and one unit's gradients in both dtypes.
    """
    sizes = sorted((sum(map(prod, unit.values())) for unit in units), reverse=True)
    if not sizes:
        return 0
    if not reshards:
        whole = precision.compute * sum(sizes)
        return whole + (precision.compute + precision.reduce) * sizes[0]
    last = sum(map(prod, head.values())) if head else 0
    others = list(sizes)
    if head:
        others.remove(last)
    # The median unit is a block: only the embedding and the head have other sizes.
    block = others[-1] if len(others) < 2 else sorted(others)[len(others) // 2]
    gradient = precision.compute + precision.reduce
    in_head = precision.compute * (last + block) + gradient * last
    in_block = precision.compute * 2 * block + gradient * block + precision.reduce * last
    return max(in_head, in_block)
