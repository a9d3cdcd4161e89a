# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Memory of the largest rank, part by part, in closed form.

Weights, gradients and optimizer state are exact: each parameter is cut by tensor parallelism as the
plan says and by FSDP2 along its first dimension, of which the first rank holds the largest piece.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torchtitan_lr.analysis.communication import PlanSettings
from torchtitan_lr.analysis.data_parallel import Shapes, unit_parameters
from torchtitan_lr.analysis.parameters import ModelShape

ADAM_MOMENTS = 2
"""Numbers that AdamW keeps for every parameter entry."""

STEP_BYTES = 4
"""AdamW's step counter of one parameter tensor, an fp32 scalar."""


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
        optimizer: AdamW's moments and step counters.
        buffers: FSDP2's gathered units (the one in use and the one prefetched), the gradient
            that is being reduced, and the rotary table.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int


def static_memory(
    shape: ModelShape,
    settings: PlanSettings,
    tp_degree: int,
    shard: int,
    precision: Precision,
    rotary_bytes: int,
    blocks: int | None = None,
) -> StaticMemory:
    """Return what a rank holds besides activations.

    Args:
        shape: Shape and family of the model.
        settings: The tensor-parallel plan; says nothing at degree 1.
        tp_degree: Tensor-parallel ranks T.
        shard: FSDP ranks; 1 for replicas.
        precision: Bytes of an element.
        rotary_bytes: Of the rotary table (max_seq_len, head_dim / 2), complex64.
        blocks: Decoder blocks on this rank; all by default. A pipeline's first stage has the
            embedding, its last the head: both are counted, for the larger of the two.
    """
    units = unit_parameters(shape, settings, tp_degree)
    kept = list(units.values())
    if blocks is not None and blocks < shape.n_layers:
        ends = [units["embedding"], [*units["head"], *units["root"]]]
        largest = max(ends, key=lambda unit: sharded_elements(unit, shard))
        kept = [*(units[f"block {shape.n_layers - 1 - i}"] for i in range(blocks)), largest]
    elements = sum(sharded_elements(unit, shard) for unit in kept)
    tensors = sum(len(unit) for unit in kept)
    buffers = rotary_bytes
    if shard > 1:
        gathered = sorted((_elements(unit) for unit in kept), reverse=True)
        buffers += precision.compute * sum(gathered[:2]) + precision.reduce * gathered[0]
    return StaticMemory(
        weights=precision.parameter * elements,
        gradients=precision.parameter * elements,
        optimizer=ADAM_MOMENTS * precision.parameter * elements + STEP_BYTES * tensors,
        buffers=buffers,
    )


def sharded_elements(unit: Shapes, shard: int) -> int:
    """Elements of a unit that FSDP's first rank holds: ceil(rows / ranks) rows of each tensor."""
    return sum(-(-shape[0] // shard) * prod(shape[1:]) for shape in unit)


def _elements(unit: Iterable[tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in unit)
