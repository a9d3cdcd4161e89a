# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Exact memory of a rank's parameters, gradients and optimizer state, in closed form.

FSDP2 splits a parameter, or what tensor parallelism left of it, into pieces of ceil(rows / ranks)
rows: the first rank has most, the last may have none. A spectral optimizer's A split by columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    tsr: Mapping[str, MatrixPlan] | None = None,
    shard_rank: int = 0,
    spectral: Mapping[str, int] | None = None,
    by_columns: Collection[str] = (),
) -> dict[str, int]:
    """Return the bytes that a rank holds during the whole run, without buffers.

    TSR-Adam keeps U (m, r) and V (n, r), sharded like the matrix's rows and columns, and two
    moments (r, r); one-sided U and two moments (r, n). A spectral optimizer's matrix has a
    momentum, Spectron's also a vector of the length in `spectral`. All else has AdamW's moments,
    fp32 or wider under TSR-Adam. `parameters` are shapes on this tensor-parallel rank, for each of
    its model parts.
    """
    elements = optimizer = 0
    spectral = spectral or {}
    size = precision.parameter if tsr is None else max(4, precision.parameter)
    for part in parameters:
        local = {}
        for name, shape in part.items():
            local[name] = sharded(shape, shard, shard_rank, int(name in by_columns))
        elements += sum(map(prod, local.values()))
        optimizer += STEP_BYTES * (len(local.keys() - spectral.keys()) if tsr is None else 1)
        for name, shape in local.items():
            if name in spectral:
                optimizer += max(4, size) * (prod(shape) + spectral[name])
                continue
            plan = None if tsr is None else tsr.get(name)
            moments = prod(shape)
            if plan is not None:
                m, n = reversed(shape) if plan.transposed else shape
                moments = plan.core_elements(n)
                optimizer += COUNTER_BYTES + size * plan.rank * (m + n * plan.two_sided)
            optimizer += ADAM_MOMENTS * size * moments
    weights = precision.parameter * elements
    return {"weights": weights, "gradients": weights, "optimizer": optimizer}


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
