# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Floating-point operations of a training step, in closed form.

The formulas count multiplications and additions of matrix products: 2·m·n·k for an (m, k) by (k, n)
product in forward, and twice that in backward (one product per operand's gradient; CoLA, section
3.2). They omit norms, activations, RoPE, the embedding look-up and recomputation, as MFU requires.
Causal attention is counted in full, as in CoLA's Table 2 and by ``torch.utils.flop_counter`` under
``SDPBackend.MATH``.
"""

from dataclasses import dataclass

from tests.oracle.parameters import (
    attention_sides,
    feed_forward_sides,
    group_ranks,
    linear_parameters,
)
from torchtitan_lr.models.args import LlamaArgs

FORWARD_AND_BACKWARD = 3
"""Forward counts once, backward twice."""


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of one block, forward and backward, for one sequence."""

    attention_linears: int
    attention_scores: int
    feed_forward: int

    @property
    def total(self) -> int:
        return self.attention_linears + self.attention_scores + self.feed_forward


def layer_flops(shape: LlamaArgs, seq_len: int) -> LayerFlops:
    """Return the FLOPs of one block for one sequence of n tokens, forward and backward.

    With multi-head attention and one rank these are 24nd² + 12n²d + 18ndf at full rank (CoLA,
    Table 2) and 48ndr + 12n²d + 18nr(d + f) factorized (CoLA, Table 3). Grouped-query attention
    shortens only the k and v linears. Every query head still attends to every key, hence 12n²d.
    """
    rank_attention, rank_ffn = group_ranks(shape)
    # A product of n rows with a linear's matrices costs 2n per parameter.
    per_parameter = FORWARD_AND_BACKWARD * 2 * seq_len
    attention = sum(linear_parameters(*side, rank_attention) for side in attention_sides(shape))
    feed_forward = sum(linear_parameters(*side, rank_ffn) for side in feed_forward_sides(shape))
    return LayerFlops(
        attention_linears=per_parameter * attention,
        attention_scores=FORWARD_AND_BACKWARD * 2 * (2 * seq_len * seq_len * shape.dim),
        feed_forward=per_parameter * feed_forward,
    )


def head_flops(shape: LlamaArgs, seq_len: int) -> int:
    """Return the FLOPs of the output projection per sequence, forward and backward: 6ndV."""
    return FORWARD_AND_BACKWARD * 2 * seq_len * shape.dim * shape.vocab_size


def flops_per_token(shape: LlamaArgs, seq_len: int) -> int:
    """Return the FLOPs of the model per token, forward and backward; every term has a factor n."""
    blocks = shape.n_layers * layer_flops(shape, seq_len).total
    return (blocks + head_flops(shape, seq_len)) // seq_len
