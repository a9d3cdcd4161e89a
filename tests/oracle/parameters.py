# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Number of parameters of a model in closed form."""

from torchtitan_lr.models.args import LlamaArgs


def linear_parameters(d_in: int, d_out: int, rank: int | None) -> int:
    return d_in * d_out if rank is None else rank * (d_in + d_out)


def attention_sides(shape: LlamaArgs) -> list[tuple[int, int]]:
    """Return (d_in, d_out) of wq, wk, wv, wo."""
    d, d_kv = shape.dim, shape.kv_dim
    return [(d, d), (d, d_kv), (d, d_kv), (d, d)]


def feed_forward_sides(shape: LlamaArgs) -> list[tuple[int, int]]:
    """Return (d_in, d_out) of w1 (gate), w3 (up), w2 (down)."""
    d, f = shape.dim, shape.ffn_dim
    return [(d, f), (d, f), (f, d)]


def group_ranks(shape: LlamaArgs) -> tuple[int | None, int | None]:
    """Return the ranks of the attention and feed-forward groups; None for full matrices."""
    if shape.family == "full":
        return None, None
    return shape.rank_attention, shape.rank_ffn


def count_parameters(shape: LlamaArgs) -> int:
    """Count the parameters of a model (CoLA, Tables 1 and 5, generalized).

    With multi-head attention and one rank r the linears of a block have 4d² + 3df parameters at
    full rank and 8dr + 3r(d + f) factorized. Grouped-query attention shortens k and v to d_kv, and
    each group may have its own rank. The embedding and the head are dense and untied.
    """
    d, layers = shape.dim, shape.n_layers
    rank_attention, rank_ffn = group_ranks(shape)
    attention = sum(linear_parameters(*side, rank_attention) for side in attention_sides(shape))
    feed_forward = sum(linear_parameters(*side, rank_ffn) for side in feed_forward_sides(shape))
    # The first block receives no latents, so it has nothing to gate.
    gated = shape.family == "lax" and shape.lax_gate == "scalar"
    gates = 7 * (layers - 1) if gated else 0
    norms = (2 * layers + 1) * d
    return layers * (attention + feed_forward) + norms + gates + 2 * shape.vocab_size * d
