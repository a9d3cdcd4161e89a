# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of FSDP2, HSDP and replication in closed form.

The gradients of the linears of L low-rank blocks are L(11dr + 3·d_ff·r) elements, against
L(4d² + 3d·d_ff) at full rank (BOOST, Table 6). The formulas here are exact: they count all
parameters of FSDP2's units (the embedding, each block, the head, and the root, which has the final
norm), each padded to the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torchtitan_lr.formulas.parameters import (
    ModelShape,
    ranked_sides,
)
from torchtitan_lr.formulas.plans.registry import formula_of
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic, merge

Shapes = list[tuple[int, ...]]
"""Shapes of a unit's parameters on one tensor-parallel rank."""


@dataclass(frozen=True)
class DataParallel:
    """Degrees and policy.

    Args:
        replicate: Number of replicas.
        shard: Ranks that shard each parameter.
        reshard_after_forward: Whether weights are gathered again for backward.
        reshard_last: The same for the head, the first unit in backward.
        microbatches: Forward and backward passes per optimizer step.
    """

    replicate: int
    shard: int
    reshard_after_forward: bool = True
    reshard_last: bool = False
    microbatches: int = 1


def data_parallel_traffic(
    shape: ModelShape, settings: PlanSettings, tp_degree: int, layout: DataParallel
) -> list[Traffic]:
    """Return every data-parallel collective of one optimizer step.

    In every micro-batch, FSDP gathers a unit's weights for forward (and again for backward if they
    are resharded) and reduce-scatters its gradients. Sums over replicas run only in the last one.

    Args:
        shape: Shape and family of the model.
        settings: The tensor-parallel plan; ignored when T is 1.
        tp_degree: Tensor-parallel ranks T.
        layout: Degrees and policy.

    Returns:
        Rows for the embedding, every block and the head (with the final norm). Elements include
        FSDP's padding.
    """
    rows: list[Traffic] = []
    for unit, parameters in unit_parameters(shape, settings, tp_degree).items():
        scope = "head" if unit == "root" else unit
        if layout.shard > 1:
            last = unit == "head"
            reshards = layout.reshard_last if last else layout.reshard_after_forward
            rows += _fsdp_unit(scope, padded(parameters, layout.shard), reshards, layout)
        elif layout.replicate > 1:
            whole = sum(prod(parameter) for parameter in parameters)
            rows.append(
                Traffic(scope, "backward", "all_reduce", "gradient", 1, whole, "dp_replicate")
            )
    return merge(rows)


def _fsdp_unit(scope: str, elements: int, reshards: bool, layout: DataParallel) -> list[Traffic]:
    k = layout.microbatches
    whole = k * elements
    rows = [
        Traffic(scope, "forward", "all_gather", "parameter", k, whole, "fsdp"),
        Traffic(scope, "backward", "reduce_scatter", "gradient", k, whole, "fsdp"),
    ]
    if reshards:
        rows.append(Traffic(scope, "backward", "all_gather", "parameter", k, whole, "fsdp"))
    if layout.replicate > 1:
        shard = elements // layout.shard
        rows.append(Traffic(scope, "backward", "all_reduce", "gradient", 1, shard, "dp_replicate"))
    return rows


def unit_parameters(shape: ModelShape, settings: PlanSettings, tp_degree: int) -> dict[str, Shapes]:
    """Return the parameter shapes of each FSDP unit on one tensor-parallel rank.

    Args:
        shape: Shape and family of the model.
        settings: The tensor-parallel plan.
        tp_degree: Tensor-parallel ranks T.

    Returns:
        Shapes by unit: ``embedding``, ``block 0`` ..., ``head``, ``root``.
    """
    t, d, vocabulary = tp_degree, shape.dim, shape.vocab_size
    norm = d // t if formula_of(settings, t).shards_stream else d
    final_norm = norm if settings.head == "scatter" else d
    units: dict[str, Shapes] = {"embedding": [(vocabulary, d // t)]}
    for i in range(shape.n_layers):
        gated = shape.family == "lax" and shape.lax_gate == "scalar" and i > 0
        linears = _linears(shape, settings, t)
        units[f"block {i}"] = [*linears, (norm,), (norm,), *[(1,)] * (7 if gated else 0)]
    units |= {"head": [(vocabulary // t, d)], "root": [(final_norm,)]}
    return units


def unit_names(shape: ModelShape) -> dict[str, list[str]]:
    """Return the parameter names of each FSDP unit, in the order of `unit_parameters`."""
    linears = [f"attention.w{name}" for name in "qkvo"]
    linears += [f"feed_forward.w{name}" for name in "132"]
    factors = ["weight"] if shape.family == "full" else ["A.weight", "B.weight"]
    names = [f"{linear}.{factor}" for linear in linears for factor in factors]
    names += ["attention_norm.weight", "ffn_norm.weight"]
    units = {"embedding": ["tok_embeddings.weight"]}
    for i in range(shape.n_layers):
        gated = shape.family == "lax" and shape.lax_gate == "scalar" and i > 0
        gates = [f"{linear}.gate" for linear in linears] if gated else []
        units[f"block {i}"] = [f"layers.{i}.{name}" for name in (*names, *gates)]
    return units | {"head": ["output.weight"], "root": ["norm.weight"]}


def named_parameters(
    shape: ModelShape, settings: PlanSettings, tp_degree: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return shapes by name and FSDP unit; arguments as in `unit_parameters`."""
    units = unit_parameters(shape, settings, tp_degree)
    return {
        unit: dict(zip(names, units[unit], strict=True))
        for unit, names in unit_names(shape).items()
    }


def _linears(shape: ModelShape, settings: PlanSettings, t: int) -> Shapes:
    shapes: Shapes = []
    for i, (d_in, d_out, rank) in enumerate(ranked_sides(shape)):
        if rank is None:
            row_parallel = i in (3, 6)  # o and down
            shapes.append((d_out, d_in // t) if row_parallel else (d_out // t, d_in))
        else:
            shapes += formula_of(settings, t).factors(d_in, d_out, rank, t)
    return shapes


def padded(parameters: Sequence[tuple[int, ...]], ranks: int) -> int:
    """Return the elements of parameters that FSDP2 shards on dim 0, each padded to the ranks.

    Args:
        parameters: Shapes.
        ranks: Ranks of the shard dimension.
    """
    return sum(-(-shape[0] // ranks) * ranks * prod(shape[1:]) for shape in parameters)
