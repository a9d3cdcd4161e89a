# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of tensor parallelism in closed form: calls and elements, by part and pass.

BOOST counts the payloads per block and pass: 2bsd at full rank, 5bsd + 2bs·d_ff for vanilla
low-rank tensor parallelism (Eq. 2), 7bsr for BTP (Eq. 3, Table 6). Twice that with backward holds
for BTP and full rank; vanilla's backward differs. Here stands every call of every plan in both
passes, on paper: a measured step can disagree. n is the number of tokens b·s of a micro-batch on a
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_lr.costs.messages import Traffic, backward, forward, merge

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.parallel.plan_parts import TPSettings

Parts = dict[str, list[Traffic]]
"""Collectives by part of the model: ``embedding``, ``block``, ``head``, and maybe ``gates``."""

Formula = Callable[["LlamaArgs", "TPSettings", int, int], Parts]
"""A plan on paper, from arguments, settings, n and T > 1.

``gates`` are of a block that mixes latents, so of no first one; ``head`` is with the final norm,
and without the gather of logits.
"""


def gates(shape: LlamaArgs) -> list[Traffic]:
    """Learned gates on shards of latents: the ranks sum their gradients, once per group."""
    # Of q, k, v; o; gate, up; down
    return [backward("all_reduce", [3, 1, 2, 1])] if shape.learns_gates else []


def btp(shape: LlamaArgs, settings: TPSettings, n: int, ranks: int) -> Parts:
    """Bottleneck-aware, r-wide payloads: 7bsr per pass, two norms' statistics (BOOST, Eq. 3).

    The embedding sends nothing: the stream is sharded as it is. The head gathers γ ⊙ x, and
    reduce-scatters its gradient: bsd each way.
    """
    sequence, online = settings.comm == "sequence", settings.norm == "online"
    reduce = "reduce_scatter" if sequence else "all_reduce"
    attention, ffn = shape.rank_attention, shape.rank_ffn
    # Widths r of q, k, v; o; gate, up; down, and whether a norm stands in front of the group
    groups = [([attention] * 3, True), ([attention], False), ([ffn] * 2, True), ([ffn], False)]
    rows: list[Traffic] = []
    for widths, has_norm in groups:
        payloads = [sum(widths)] if settings.grouping else widths
        rows.append(forward(reduce, [n * width for width in payloads]))
        # Backward, of the copies that the column-parallel B's were given.
        rows.append(backward(reduce, [n * width for width in payloads]))
        if sequence:
            rows.append(forward("all_gather", [n * width for width in payloads]))
            rows.append(backward("all_gather", [n * width for width in payloads]))
        if has_norm and not online:
            rows.append(forward("all_reduce", [n], "statistic"))
            rows.append(backward("all_reduce", [n], "statistic"))
        elif has_norm:
            rows.append(forward(reduce, [n], "statistic"))
            if sequence:  # each rank knows dS of its own tokens only
                rows.append(backward("all_gather", [n], "statistic"))
    stream = [n * shape.dim]
    head = [forward("all_gather", stream), forward("all_reduce", [n], "statistic")]
    head += [backward("reduce_scatter", stream), backward("all_reduce", [n], "statistic")]
    parts = {"embedding": [], "block": rows, "head": head}
    return parts | {"gates": gates(shape)} if sequence else parts


def vanilla(shape: LlamaArgs, settings: TPSettings, n: int, ranks: int) -> Parts:
    """BOOST's Eq. 2: its fair form, and the form with every head on every rank that it measures."""
    d, f = n * shape.dim, n * shape.ffn_dim
    qkv = [d, n * shape.kv_dim, n * shape.kv_dim]
    rows = [forward("all_reduce", [d, f, f, d])]  # o, gate, up, down
    if settings.plan == "vanilla_replicated":
        # Every rank sums all of q, k and v; in backward, the gradient of A_o's input.
        rows += [forward("all_reduce", qkv), backward("all_reduce", qkv[:1])]
    else:
        # Heads are sharded before attention, and gathered after it: its output is as wide as q.
        rows += [forward("reduce_scatter", qkv), backward("all_gather", qkv)]
        rows += [forward("all_gather", qkv[:1]), backward("reduce_scatter", qkv[:1])]
    # Gradients of the inputs of A_q,k,v and A_gate,up (d wide), and of A_down (f wide).
    rows.append(backward("all_reduce", [*[d] * (2 if settings.grouping else 5), f]))
    ends = {"embedding": [forward("all_gather", [d])], "head": [backward("all_reduce", [d])]}
    return {**ends, "block": rows, "gates": gates(shape)}


def megatron(shape: LlamaArgs, settings: TPSettings, n: int, ranks: int) -> Parts:
    """2bsd in each pass (BOOST, Table 6); token shards split each sum in two halves.

    Token shards of the stream give shards of the embedding's gradient, which are gathered, and are
    gathered themselves in front of the output.
    """
    stream = [n * shape.dim]
    embedding = [forward("all_gather", stream)]
    if settings.comm == "all_reduce":
        block = [make("all_reduce", stream * 2) for make in (forward, backward)]
        return {"embedding": embedding, "block": block, "head": [backward("all_reduce", stream)]}
    halves = ("all_gather", "reduce_scatter")
    block = [make(op, stream * 2) for make in (forward, backward) for op in halves]
    # The norms see a shard of the tokens, so their weights' gradients are summed.
    block.append(backward("all_reduce", [shape.dim] * 2))
    head = [forward("all_gather", stream), backward("reduce_scatter", stream)]
    head.append(backward("all_reduce", [shape.dim]))
    embedding.append(backward("all_gather", stream))
    return {"embedding": embedding, "block": block, "head": head}


def caat(shape: LlamaArgs, settings: TPSettings, n: int, ranks: int) -> Parts:
    """CAAT-Net: p times Megatron's payloads, 2·p·bsd in each pass, and the norms' weights.

    The embedding's backward sums the gradients of all lanes. The lanes' streams stay on their ranks
    in front of the head.
    """
    shared = n * int(shape.sync_fraction * shape.dim)
    stream, both = [n * shape.dim], [shared] * 2
    block = [backward("all_reduce", [shape.dim] * 2)]
    if shared:
        block.append(forward("all_reduce", both))
    if shared and settings.wide_sums:  # add in fp32, send half precision
        padded = [-(-shared // ranks) * ranks] * 2
        block += [backward("all_to_all", padded), backward("all_gather", padded)]
    elif shared:
        block.append(backward("all_reduce", both))
    summed = "all_to_all" if settings.wide_sums else "reduce_scatter"
    return {
        "embedding": [forward("all_gather", stream), backward(summed, stream)],
        "block": block,
        "head": [backward("all_reduce", [shape.dim])],
    }


FORMULAS: dict[str, Formula] = {
    "btp": btp,
    "vanilla": vanilla,
    "vanilla_replicated": vanilla,
    "megatron": megatron,
    "caat": caat,
}
"""By the plan's name; modules from outside add theirs."""


def model_traffic(
    shape: LlamaArgs, settings: TPSettings, tp_degree: int, tokens: int
) -> list[Traffic]:
    """Return every tensor-parallel collective of a micro-batch of n tokens on T ranks."""
    if tp_degree == 1:
        return []
    parts = FORMULAS[settings.plan](shape, settings, tokens, tp_degree)
    rows = [replace(row, scope="embedding") for row in parts["embedding"]]
    for i in range(shape.n_layers):
        # The first block receives no latents, so it has nothing to gate.
        block = parts["block"] + (parts.get("gates", []) if i else [])
        rows += [replace(row, scope=f"block {i}") for row in block]
    rows += [replace(row, scope="head") for row in parts["head"]]
    # The log-sum-exp of every token is gathered from the ranks, in one call per chunk of tokens,
    # and the loss is summed. A chunk is an eighth of the tokens, from 512 to 4096; all up to 512
    # or d.
    size = tokens
    if tokens > max(shape.dim, 512):
        size = min(max(-(-tokens // 8), 512), 4096)
    chunks = [tp_degree * min(size, tokens - start) for start in range(0, tokens, size)]
    rows.append(forward("all_gather", chunks, "loss", scope="head"))
    rows.append(forward("all_reduce", [1], "loss", scope="head"))
    return merge(rows)
