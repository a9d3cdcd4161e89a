# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What low-rank activation checkpointing saves (bytes) and recomputes (FLOPs), in closed form."""

from dataclasses import dataclass

from tests.oracle.parameters import attention_sides, feed_forward_sides
from torchtitan_lr.costs.tp_messages import FORMULAS, PlanFormula
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.plan_parts import TPSettings


@dataclass(frozen=True)
class Split:
    """Tensor-parallel split of a block."""

    degree: int = 1
    settings: TPSettings | None = None

    @property
    def formula(self) -> PlanFormula:
        """The plan's formula."""
        plan = "megatron" if self.settings is None or self.degree == 1 else self.settings.plan
        return FORMULAS[plan]  # at T = 1 all are equal: nothing is split


def kept_bytes(
    shape: LlamaArgs,
    tokens: int,
    n_heads: int,
    element_size: int,
    save_attention: bool = False,
    split: Split = Split(),
) -> int:
    """Return the bytes that one block saves for backward under low-rank checkpointing, per rank.

    The block's input and the seven latents: nd + 7nr elements (the residual in the middle of the
    block, the second nd of CoLA's Table 4, is made again from the o latent). A rank that shards the
    stream keeps nd/T and the statistics of two norms. Where A is split along r, it keeps nr/T of a
    latent. BTP's token shards keep 7nr/T latents, and 7nr gathered ones: gathering again would
    communicate.
    """
    formula, t = split.formula, split.degree
    statistic_size = max(4, element_size)
    attention, feed_forward = 4 * shape.rank_attention, 3 * shape.rank_ffn
    if formula.attention[0] == 0:
        attention //= t
    if formula.feed_forward[0] == 0:
        feed_forward //= t
    latents = tokens * (attention + feed_forward)
    stream, statistics = tokens * shape.dim, 0
    if formula.shards_stream:
        assert split.settings is not None
        sequence = split.settings.comm == "sequence"
        stream, latents = stream // t, latents + (latents // t if sequence else 0)
        online = sequence and split.settings.norm == "online"
        statistics = 2 * tokens // (t if online else 1)
    size = (stream + latents) * element_size + statistics * statistic_size
    if save_attention:
        shards = t if formula.shards_heads else 1
        size += tokens * shape.dim // shards * element_size
        size += tokens * n_heads // shards * statistic_size
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
