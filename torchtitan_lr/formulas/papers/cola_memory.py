# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Elements that a block saves for backward, as counted by CoLA (Table 4 and Appendix C).

These are the paper's conventions, not ours: attention's n×n scores are saved, as without a fused
kernel, and every intermediate counts once, in elements, regardless of its dtype. `activations` has
the formulas for our own low-rank checkpointing.
"""

from torchtitan_lr.formulas.activations import layer_recompute_flops, recompute_flops
from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, layer_flops
from torchtitan_lr.formulas.parameters import ModelShape


def full_rank_elements(shape: ModelShape, seq_len: int, n_heads: int) -> int:
    """Return the elements a full-rank block saves per sequence: 20nd + 2n²h at d_ff = 2.5d.

    q, k, v (3nd); scores and probabilities (2n²h), their product with v and its projection
    (2nd); gate, up, the activated gate and their product (4n·d_ff), down (nd); two residual sums
    and two norms (4nd). Grouped queries are not considered.
    """
    n, d, f = seq_len, shape.dim, shape.ffn_dim
    return 3 * n * d + 2 * n * n * n_heads + 2 * n * d + 4 * n * f + n * d + 4 * n * d


def cola_elements(shape: ModelShape, seq_len: int, n_heads: int) -> int:
    """Return the elements a CoLA block saves: 17.5nd + 2n²h + 14nr at d_ff = 2.5d.

    Compared with full rank, A x and σ(A x) of seven linears are added; the activated gate, n·d_ff,
    is removed.
    """
    latents = 2 * seq_len * (4 * shape.rank_attention + 3 * shape.rank_ffn)
    return full_rank_elements(shape, seq_len, n_heads) + latents - seq_len * shape.ffn_dim


def checkpointed_elements(shape: ModelShape, seq_len: int) -> int:
    """Return the elements saved with checkpointing: nd at full rank, 2nd + 7nr for CoLA-M."""
    if shape.family == "full":
        return seq_len * shape.dim
    latents = 4 * shape.rank_attention + 3 * shape.rank_ffn
    return seq_len * (2 * shape.dim + latents)


def checkpointed_flops(shape: ModelShape, seq_len: int) -> tuple[float, int]:
    """Return the recomputed FLOPs per sequence: the printed and the correct count.

    Full rank recomputes the block, 23nd² + 4n²d at d_ff = 2.5d: the two counts agree. For CoLA-M
    the paper takes half of the linears' forward pass and attention, 18.5ndr + 4n²d; the
    up-projections of all but the last linear are (8 + 4·d_ff/d)ndr, 18.0ndr.

    Returns:
        The printed count and the correct one.
    """
    if shape.family == "full":
        whole = layer_recompute_flops(shape, seq_len)
        return whole, whole
    layer = layer_flops(shape, seq_len)
    linears = (layer.attention_linears + layer.feed_forward) / FORWARD_AND_BACKWARD
    scores = layer.attention_scores / FORWARD_AND_BACKWARD
    return linears / 2 + scores, recompute_flops(shape, seq_len)


def training_flops(full: ModelShape, low: ModelShape, seq_len: int) -> dict[str, float]:
    """Return the FLOPs of training over those of full rank, by Tables 3 and 4.

    Args:
        full: The full-rank shape; d_ff = 2.5d in the paper.
        low: The CoLA shape.
        seq_len: Tokens n.

    Returns:
        Ratios of ``GCP`` (full rank, every block recomputed), ``CoLA`` and ``CoLA-M``.
    """
    whole = layer_flops(full, seq_len).total
    cola = layer_flops(low, seq_len).total
    gcp, cola_m = (checkpointed_flops(shape, seq_len)[0] for shape in (full, low))
    return {"GCP": 1 + gcp / whole, "CoLA": cola / whole, "CoLA-M": (cola + cola_m) / whole}


def printed_training_flops(full: ModelShape, low: ModelShape, seq_len: int) -> dict[str, float]:
    """Return the ratios as in Table 9: recomputation counted twice, over the linears' FLOPs.

    The recomputation includes attention's products; the other terms omit them.
    """
    layers = layer_flops(full, seq_len), layer_flops(low, seq_len)
    whole, cola = (layer.attention_linears + layer.feed_forward for layer in layers)
    gcp, cola_m = (2 * checkpointed_flops(shape, seq_len)[0] for shape in (full, low))
    return {"GCP": 1 + gcp / whole, "CoLA": cola / whole, "CoLA-M": (cola + cola_m) / whole}
