# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A tensor-parallel plan from outside the package: ``gathered``.

Each rank stores 1/T of every factor, gathers it where it is applied, and repeats the whole block.
A run names this module by ``experimental.custom_import``.
"""

from functools import partial

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import torchtitan_lr.training.register  # noqa: F401  # the models, as the default module does
from torchtitan_lr.formulas.parameters import attention_sides, feed_forward_sides
from torchtitan_lr.formulas.plans.formula import PlanFormula, forward
from torchtitan_lr.formulas.plans.registry import register_formula
from torchtitan_lr.models.marks import keep
from torchtitan_lr.parallel.tensor import plan
from torchtitan_lr.parallel.tensor.collectives import Ranks, gather_replicated
from torchtitan_lr.parallel.tensor.ends import GatheredEmbedEdge, VocabParallelHead
from torchtitan_lr.parallel.tensor.plans import TensorParallelPlan, register_plan
from torchtitan_lr.parallel.tensor.styles import ShardedMixEdge, local, replicated_norm


class GatheredEdge(nn.Module):
    """Gathers A (r/T, d_in) or B (d_out/T, r), both Shard(0), and applies it."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def apply(self, x, linear):
        return F.linear(x, gather_replicated(local(linear.weight), self.ranks, 0))


class GatheredDownEdge(GatheredEdge):
    def forward(self, x, linears, norm=None):
        x = x if norm is None else replicated_norm(x, norm)
        return [keep(self.apply(x, linear.A)) for linear in linears]


class GatheredUpEdge(GatheredEdge):
    def forward(self, latents, linears):
        pairs = zip(latents, linears, strict=True)
        return [self.apply(latent, linear.B) for latent, linear in pairs]


class Gathered(TensorParallelPlan):
    name = "gathered"

    def styles(self, args, settings):
        down, up = plan.on_ranks(GatheredDownEdge), plan.on_ranks(GatheredUpEdge)
        mix = plan.on_ranks(ShardedMixEdge, False) if args.family == "lax" else None
        attention = {"down_qkv": down, "up_qkv": up, "down_o": down, "up_o": up}
        ffn = {"down_gate_up": down, "up_gate_up": up, "down_down": down, "up_down": up}
        head = partial(VocabParallelHead, stream="replicated", loss_parallel=settings.loss_parallel)
        return {
            **plan.low_rank_blocks(Shard(0), Shard(0), Replicate()),
            **plan.block_edges(attention, ffn, mix),
            **plan.model_ends(plan.on_ranks(GatheredEmbedEdge), head, Replicate()),
        }

    def widths(self, args):
        names = ("dim", "kv_dim", "ffn_dim", "rank_attention", "rank_ffn", "vocab_size")
        return {name: getattr(args, name) for name in names}


class GatheredFormula(PlanFormula):
    name = "gathered"
    shards_heads = False

    def block(self, shape, settings, n, ranks, column_multiple):
        sides = [(*side, shape.rank_attention) for side in attention_sides(shape)]
        sides += [(*side, shape.rank_ffn) for side in feed_forward_sides(shape)]
        return [forward("all_gather", [r * d for *widths, r in sides for d in widths])]

    def factors(self, d_in, d_out, rank, t):
        return [(rank // t, d_in), (d_out // t, rank)]


register_plan(Gathered())
register_formula(GatheredFormula())
