# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Saved bytes and recomputed FLOPs of low-rank activation checkpointing, in closed form."""

from dataclasses import dataclass

from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, layer_flops
from torchtitan_lr.formulas.parameters import ModelShape, attention_sides, feed_forward_sides
from torchtitan_lr.formulas.plans.formula import PlanFormula
from torchtitan_lr.formulas.plans.registry import UNSPLIT, formula_of
from torchtitan_lr.formulas.traffic import PlanSettings

NORMS = 2
"""Number of RMSNorms in a block."""


@dataclass(frozen=True)
class Split:
    """Tensor-parallel split of a block.

    Args:
        degree: Tensor-parallel ranks T.
        settings: The plan; required if T > 1.
    """

    degree: int = 1
    settings: PlanSettings | None = None

    @property
    def formula(self) -> PlanFormula:
        """The plan's formula."""
        return UNSPLIT if self.settings is None else formula_of(self.settings, self.degree)

    @property
    def sequence(self) -> bool:
        """Whether latents are token-sharded."""
        tokens = self.settings is not None and self.settings.comm == "sequence"
        return self.formula.shards_stream and tokens


def kept_bytes(
    shape: ModelShape,
    tokens: int,
    n_heads: int,
    element_size: int,
    save_attention: bool = False,
    split: Split = Split(),
) -> int:
    """Return the bytes that one block saves for backward under low-rank checkpointing, per rank.

    A block saves its input and the seven latents: nd + 7nr elements. (The residual in the middle of
    the block, the second nd of CoLA's Table 4, is recomputed from the o latent.) Under BTP the
    input is sharded, nd/T, and the latents are not; each norm's statistic is saved too, n numbers
    in fp32 (fp64 for fp64). With token sharding the latents have 7nr/T elements, and their gathered
    copies before the up-projections, 7nr, are saved too, because gathering again would communicate.

    Args:
        shape: Shape and family of the model; low-rank.
        tokens: Tokens n of the micro-batch.
        n_heads: Query heads.
        element_size: Bytes per activation element.
        save_attention: Whether attention's output (nd/T elements) and the log-sum-exp of every head
            and token are saved. T is 1 here if every rank computes all heads.
        split: Tensor parallelism.
    """
    t = split.degree
    latents = tokens * (4 * shape.rank_attention + 3 * shape.rank_ffn)
    stream = tokens * shape.dim // (t if split.formula.shards_stream else 1)
    statistic_size = max(4, element_size)
    kept = stream * element_size
    kept += latents * element_size // (t if split.formula.shards_latents or split.sequence else 1)
    if split.sequence:
        kept += latents * element_size
    if split.formula.shards_stream:
        online = split.settings is not None and split.settings.norm == "online"
        kept += NORMS * tokens * statistic_size // (t if split.sequence and online else 1)
    if save_attention:
        shards = t if split.formula.shards_heads else 1
        kept += tokens * shape.dim // shards * element_size
        kept += tokens * n_heads // shards * statistic_size
    return kept


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
