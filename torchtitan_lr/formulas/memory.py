# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Memory of a rank's parameters, gradients and optimizer state, in closed form and exact.

Each parameter is cut by tensor parallelism as the plan says and by FSDP2 along its first dimension:
into pieces of ceil(rows / ranks) rows, so that the first rank has the most and the last may have
none.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

Shape = tuple[int, ...]
NamedShapes = Mapping[str, Shape]

ADAM_MOMENTS = 2
"""Numbers that AdamW keeps for every parameter entry."""

STEP_BYTES = 4
"""A step counter, an fp32 scalar: AdamW has one a tensor, TSR-Adam one a model part."""

COUNTER_BYTES = 8
"""One of the two int64 counters, age and refreshes, that TSR-Adam keeps for a matrix."""


class TSRPlan(Protocol):
    """How TSR-Adam compresses a matrix; ``MatrixPlan`` has these."""

    @property
    def rank(self) -> int:
        """Rank r."""

    @property
    def two_sided(self) -> bool:
        """Whether both sides are projected."""

    @property
    def transposed(self) -> bool:
        """Whether the parameter is projected transposed."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element.

    Args:
        parameter: Of the stored weights, their gradients and moments (``training.dtype``).
        compute: Of gathered weights and activations (``training.mixed_precision_param``).
        reduce: Of gradients on the wire (``training.mixed_precision_reduce``).
    """

    parameter: int = 4
    compute: int = 2
    reduce: int = 4


@dataclass(frozen=True)
class StaticMemory:
    """Bytes that a rank holds for the whole run.

    Args:
        weights: Its shards of the parameters.
        gradients: Of the same shapes.
        optimizer: Moments, step counters, and TSR-Adam's bases.
    """

    weights: int
    gradients: int
    optimizer: int


def static_memory(
    parameters: Iterable[NamedShapes],
    shard: int,
    precision: Precision,
    tsr: Mapping[str, TSRPlan] | None = None,
    shard_rank: int = 0,
) -> StaticMemory:
    """Return what a rank holds besides activations and buffers.

    Args:
        parameters: Of each model part of the rank: shapes on its tensor-parallel rank, by name.
        shard: FSDP ranks; 1 for replicas.
        precision: Bytes of an element.
        tsr: TSR-Adam's compressed matrices by name; None for AdamW.
        shard_rank: Which FSDP rank; the first holds the most.
    """
    elements = optimizer = 0
    for part in parameters:
        local = {name: sharded(shape, shard, shard_rank) for name, shape in part.items()}
        elements += sum(map(prod, local.values()))
        if tsr is None:
            optimizer += adamw_bytes(local.values(), precision.parameter)
        else:
            optimizer += tsr_bytes(local, tsr, precision.parameter)
    weights = precision.parameter * elements
    return StaticMemory(weights, weights, optimizer)


def sharded(shape: Shape, ranks: int, rank: int = 0) -> Shape:
    """Return the shape of an FSDP rank's piece of a tensor."""
    rows = -(-shape[0] // ranks)
    return (max(0, min(rows, shape[0] - rank * rows)), *shape[1:])


def adamw_bytes(shapes: Collection[Shape], element_size: int) -> int:
    """Return the bytes of AdamW's state: two moments in the parameters' dtype, a step a tensor."""
    return ADAM_MOMENTS * element_size * sum(map(prod, shapes)) + STEP_BYTES * len(shapes)


def tsr_bytes(shapes: NamedShapes, plans: Mapping[str, TSRPlan], element_size: int) -> int:
    """Return the bytes of TSR-Adam's state of one model part, in fp32 at least.

    A compressed matrix has U (m, r), V (n, r) and two moments (r, r), of which U and V are split as
    its rows and columns are; projected on one side only, U and two moments (r, n). Everything else
    has AdamW's moments.

    Args:
        shapes: Shapes on this rank, by name.
        plans: The compressed matrices.
        element_size: Bytes of a parameter's element.
    """
    size = max(4, element_size)
    total = STEP_BYTES
    for name, shape in shapes.items():
        plan = plans.get(name)
        if plan is None:
            total += ADAM_MOMENTS * size * prod(shape)
            continue
        m, n = reversed(shape) if plan.transposed else shape
        total += 2 * COUNTER_BYTES + size * plan.rank * m
        total += size * plan.rank * n if plan.two_sided else 0
        total += ADAM_MOMENTS * size * core_elements(shape, plan)
    return total


def core_elements(shape: Shape, plan: TSRPlan) -> int:
    """Elements of a core: r·r, or r·n where one side is projected."""
    long_side = shape[0] if plan.transposed else shape[1]
    return plan.rank * (plan.rank if plan.two_sided else long_side)


def gathered_bytes(
    units: Iterable[NamedShapes], head: NamedShapes | None, reshards: bool, precision: Precision
) -> int:
    """Bytes of FSDP2's whole weights and of the gradients that it is reducing, at their most.

    Resharding, a rank holds whole the head (needed first in backward, so not resharded) or one more
    block, the block that runs, and the one fetched ahead; and the gradients of one unit twice: in
    the compute dtype and as they are sent. Otherwise every unit stays whole.

    Args:
        units: Shapes of every unit of the rank.
        head: The head's shapes, None without one.
        reshards: Whether weights are dropped between forward and backward.
        precision: Bytes of an element.
    """
    sizes = sorted((_elements(unit) for unit in units), reverse=True)
    if not sizes:
        return 0
    if not reshards:
        whole = precision.compute * sum(sizes)
        return whole + (precision.compute + precision.reduce) * sizes[0]
    last = _elements(head) if head else 0
    others = list(sizes)
    if head:
        others.remove(last)
    block = others[-1] if len(others) < 2 else sorted(others)[len(others) // 2]
    gradient = precision.compute + precision.reduce
    in_head = precision.compute * (last + block) + gradient * last
    in_block = precision.compute * 2 * block + gradient * block + precision.reduce * last
    return max(in_head, in_block)


def _elements(unit: NamedShapes) -> int:
    return sum(map(prod, unit.values()))
