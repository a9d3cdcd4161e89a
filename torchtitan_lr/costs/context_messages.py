# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Context parallelism in closed form: collectives, FLOPs and bytes of a decoder block.

C ranks share every row: each has n = b·s/C tokens, and gathers of all C·n tokens (Llama 3, section
3.3.2) k and v, 2·d_kv/T numbers each, or in a low-rank model the latents σ(A_k x) and σ(A_v x), 2r
numbers, from which it computes k and v. Backward gathers them once more, and reduce-scatters their
gradient. Latents send less while r < d_kv/T.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_lr.costs.messages import Traffic, backward, forward, merge
from torchtitan_lr.costs.tp_messages import FORMULAS

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.parallel.plan_parts import TPSettings


def kv_width(shape: LlamaArgs, settings: TPSettings, tp_degree: int) -> int:
    """Return the features of k on a tensor-parallel rank, d_kv/T; v has as many."""
    splits = tp_degree > 1 and FORMULAS[settings.plan].shards_heads
    return shape.kv_dim // tp_degree if splits else shape.kv_dim


def context_traffic(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, cp_degree: int, tokens: int, gather: str
) -> list[Traffic]:
    """Return every collective of context parallelism in a micro-batch."""
    if cp_degree == 1:
        return []
    width = kv_width(shape, settings, tp_degree) if gather == "kv" else shape.rank_attention
    payloads = [2 * cp_degree * tokens * width]  # of both in one message
    block = [forward("all_gather", payloads), backward("all_gather", payloads)]
    block.append(backward("reduce_scatter", payloads))
    rows = []
    for i in range(shape.n_layers):
        rows += [replace(row, scope=f"block {i}", mesh_dim="cp") for row in block]
    return merge(rows)


def latent_flops(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, cp_degree: int, tokens: int
) -> tuple[int, int]:
    """Return the FLOPs that gathered latents add to those of gathered k and v, per block.

    B_k and B_v take 4·r·d_kv/T per token. Forward applies them to the tokens of the C - 1 other
    ranks too. Backward has two products for each (the gradients of B and of the latent), and
    computes k and v of all C·n tokens once more.
    """
    one = 4 * shape.rank_attention * kv_width(shape, settings, tp_degree)
    others = (cp_degree - 1) * tokens
    return others * one, 2 * others * one + cp_degree * tokens * one
