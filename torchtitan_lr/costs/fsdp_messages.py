# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of FSDP2, HSDP and replication in closed form.

BOOST (Table 6) counts the gradients of the linears, L(11dr + 3·d_ff·r) elements, against L(4d² +
3d·d_ff) at full rank. These formulas are exact: all parameters of FSDP2's units, padded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from torchtitan_lr.costs.held_memory import sharded
from torchtitan_lr.costs.messages import Traffic, merge
from torchtitan_lr.costs.tp_messages import FORMULAS

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.parallel.plan_parts import TPSettings


def data_parallel_traffic(
    shape: LlamaArgs,
    settings: TPSettings,
    tp_degree: int,
    replicate: int,
    shard: int,
    reshard_after_forward: bool = True,
    reshard_last: bool = False,
    microbatches: int = 1,
    by_columns: Collection[str] = (),
) -> list[Traffic]:
    """Return every data-parallel collective of one optimizer step.

    In every micro-batch, FSDP gathers a unit's weights for forward (and again for backward if they
    are resharded) and reduce-scatters its gradients. Sums over replicas run only in the last one.
    The head is the first unit in backward: `reshard_last` is its `reshard_after_forward`. Elements
    include FSDP's padding.
    """
    rows: list[Traffic] = []
    k = microbatches
    for unit, parameters in named_parameters(shape, settings, tp_degree).items():
        scope = "head" if unit == "root" else unit
        if shard > 1:
            reshards = reshard_last if unit == "head" else reshard_after_forward
            elements = 0  # padded to the ranks
            for name, size in parameters.items():
                elements += shard * prod(sharded(size, shard, dim=int(name in by_columns)))
            gather = Traffic(scope, "forward", "all_gather", "parameter", k, k * elements, "fsdp")
            rows += [gather, replace(gather, pass_="backward")] if reshards else [gather]
            rows.append(
                Traffic(scope, "backward", "reduce_scatter", "gradient", k, k * elements, "fsdp")
            )
            whole = elements // shard
        else:
            whole = sum(prod(parameter) for parameter in parameters.values())
        if replicate > 1:
            # A rank's shard, or everything: FSDP has summed the rest.
            rows.append(
                Traffic(scope, "backward", "all_reduce", "gradient", 1, whole, "dp_replicate")
            )
    return merge(rows)


def split_by_columns(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, shard: int
) -> set[str]:
    """Return the names of the parameters that FSDP2 splits along columns for a spectral optimizer.

    These are the factors A (r, d_in) with a whole r whose columns the ranks divide.
    """
    chosen = set()
    for parameters in named_parameters(shape, settings, tp_degree).values():
        for name, size in parameters.items():
            rank = shape.rank_attention if ".attention." in name else shape.rank_ffn
            if name.endswith(".A.weight") and size[0] == rank and size[1] % shard == 0:
                chosen.add(name)
    return chosen


def named_parameters(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return shapes on one of T ranks: of ``embedding``, ``block 0`` ..., ``head``, ``root``."""
    t, d, vocabulary = tp_degree, shape.dim, shape.vocab_size
    # A single rank splits nothing, whatever the plan: ``auto`` may not be resolved there.
    formula = FORMULAS[settings.plan if t > 1 else "megatron"]
    norm = (d // t if formula.shards_stream else d,)
    linears = [f"attention.w{name}" for name in "qkvo"]
    linears += [f"feed_forward.w{name}" for name in "132"]
    d_kv, f = shape.kv_dim, shape.ffn_dim
    widths = zip([d] * 6 + [f], [d, d_kv, d_kv, d, f, f, d], strict=True)
    block: dict[str, tuple[int, ...]] = {}
    for name, (d_in, d_out) in zip(linears, widths, strict=True):
        rank, (a, b) = shape.rank_ffn, formula.feed_forward
        if name.startswith("attention"):
            rank, (a, b) = shape.rank_attention, formula.attention
        weights: list[tuple[str, tuple[int, ...], int | None]] = [
            (f"{name}.A.weight", (rank, d_in), a),
            (f"{name}.B.weight", (d_out, rank), b),
        ]
        if not shape.low_rank:
            closes_pair = name in ("attention.wo", "feed_forward.w2")
            weights = [(f"{name}.weight", (d_out, d_in), b if closes_pair else a)]
        for key, size, dim in weights:
            part = list(size)
            if dim is not None:
                part[dim] //= t
            block[key] = tuple(part)
    block |= {"attention_norm.weight": norm, "ffn_norm.weight": norm}
    names = [f"{name}.gate" for name in linears] if shape.learns_gates else []
    gates = dict.fromkeys(names, (1,))
    units: dict[str, dict[str, tuple[int, ...]]] = {
        "embedding": {"tok_embeddings.weight": (vocabulary, d // t)}
    }
    for i in range(shape.n_layers):
        # The first block receives no latents, so it has nothing to gate.
        mine = block | (gates if i else {})
        units[f"block {i}"] = {f"layers.{i}.{name}": size for name, size in mine.items()}
    units["head"] = {"output.weight": (vocabulary // t, d)}
    return units | {"root": {"norm.weight": norm}}
