# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What low-rank activation checkpointing saves (bytes) and recomputes (FLOPs), in closed form."""

from tests.oracle.parameters import attention_sides, feed_forward_sides
from torchtitan_lr.models.args import LlamaArgs


def kept_bytes(
    shape: LlamaArgs, tokens: int, n_heads: int, element_size: int, save_attention: bool = False
) -> int:
    """Return the bytes that one block saves for backward under low-rank checkpointing.

    The block's input and the seven latents: nd + 7nr elements (the residual in the middle of the
    block, the second nd of CoLA's Table 4, is made again from the o latent).
    """
    size = tokens * (shape.dim + 4 * shape.rank_attention + 3 * shape.rank_ffn) * element_size
    if save_attention:
        size += tokens * (shape.dim * element_size + n_heads * max(4, element_size))
    return size


def recompute_flops(
    shape: LlamaArgs, seq_len: int, save_attention: bool = False, tp_degree: int = 1
) -> int:
    """Return the FLOPs that low-rank checkpointing recomputes per block, sequence and rank.

    The up-projections of q, k, v, o, gate and up: (8 + 4·d_ff/d)·ndr with equal ranks and
    multi-head attention, 18.0 ndr at d_ff = 2.5d (CoLA, Eq. 18 prints 18.5). The down-projections
    are not recomputed, nor is the last up-projection, whose result is the next block's saved input.
    Attention adds 4n²d unless its output is saved.
    """
    attention = sum(d_out for _, d_out in attention_sides(shape)) * shape.rank_attention
    gate, up, _ = feed_forward_sides(shape)
    feed_forward = (gate[1] + up[1]) * shape.rank_ffn
    flops = 2 * seq_len * (attention + feed_forward)
    if not save_attention:
        flops += 4 * seq_len * seq_len * shape.dim
    return flops // tp_degree
