# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Recomputed FLOPs of low-rank activation checkpointing, in closed form."""

from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, layer_flops
from torchtitan_lr.formulas.parameters import ModelShape, attention_sides, feed_forward_sides


def recompute_flops(
    shape: ModelShape, seq_len: int, save_attention: bool = False, tp_degree: int = 1
) -> int:
    """Return the FLOPs that low-rank checkpointing recomputes per block, sequence and rank.

    The up-projections of q, k, v, o, gate and up: (8 + 4·d_ff/d)·ndr with equal ranks and
    multi-head attention, 18.0 ndr at d_ff = 2.5d (CoLA, Eq. 18 prints 18.5). The down-projections
    are not recomputed, nor is the last up-projection, whose result is the next block's saved input.
    Attention adds 4n²d unless its output is saved.

    Args:
        shape: Shape and family of the model; low-rank.
        seq_len: Tokens n in the sequence.
        save_attention: Whether attention's output is saved.
        tp_degree: Ranks T that share the work evenly (not for ``vanilla_replicated``).
    """
    attention = sum(d_out for _, d_out in attention_sides(shape)) * shape.rank_attention
    gate, up, _ = feed_forward_sides(shape)
    feed_forward = (gate[1] + up[1]) * shape.rank_ffn
    flops = 2 * seq_len * (attention + feed_forward)
    if not save_attention:
        flops += 4 * seq_len * seq_len * shape.dim
    return flops // tp_degree


def layer_recompute_flops(shape: ModelShape, seq_len: int, tp_degree: int = 1) -> int:
    """Return the FLOPs of recomputing a whole block's forward pass (full checkpointing).

    (22 + 6·d_ff/d)·ndr + 4n²d with equal ranks and multi-head attention.
    """
    return layer_flops(shape, seq_len).total // FORWARD_AND_BACKWARD // tp_degree
