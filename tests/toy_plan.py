# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A tensor-parallel plan from outside the package: ``gathered``.

Each rank stores 1/T of every factor, gathers it where it is applied, and repeats the whole block.
A run names this module by ``experimental.custom_import``.
"""

import torch.nn.functional as F
from torch.distributed.tensor import Shard

import torchtitan_lr.training.register  # noqa: F401  # the models, as the default module does
from torchtitan_lr.formulas.data_parallel import ranked_sides
from torchtitan_lr.formulas.tensor_parallel import FORMULAS, PlanFormula
from torchtitan_lr.formulas.traffic import forward
from torchtitan_lr.models.marks import keep
from torchtitan_lr.parallel.tensor import plan, plans
from torchtitan_lr.parallel.tensor.collectives import gather_replicated
from torchtitan_lr.parallel.tensor.styles import Edge, ShardedMixEdge, local, replicated_norm


class GatheredEdge(Edge):
    def product(self, x, factor):
        return F.linear(x, gather_replicated(local(factor.weight), self.ranks, 0))


class GatheredDownEdge(GatheredEdge):
    def forward(self, x, linears, norm=None):
        x = x if norm is None else replicated_norm(x, norm)
        return [keep(self.product(x, linear.A)) for linear in linears]


class GatheredUpEdge(GatheredEdge):
    def forward(self, latents, linears):
        return [self.product(x, linear.B) for x, linear in zip(latents, linears, strict=True)]


class Gathered(plan.TensorParallelPlan):
    name = "gathered"
    factors = Shard(0), Shard(0)
    shards_heads = False

    def styles(self, args, settings):
        mix = plan.on_ranks(ShardedMixEdge, False) if args.model_family.carries_latents else None
        down, up = plan.on_ranks(GatheredDownEdge), plan.on_ranks(GatheredUpEdge)
        blocks = self.low_rank_blocks(plan.low_rank_edges(down, up, mix))
        return blocks | plan.model_ends(settings)


class GatheredFormula(PlanFormula):
    shards_heads = False

    def block(self, shape, settings, n, ranks, column_multiple):
        sides = ranked_sides(shape)
        return [forward("all_gather", [r * width for *widths, r in sides for width in widths])]

    def factors(self, d_in, d_out, rank, t):
        return [(rank // t, d_in), (d_out // t, rank)]


plans.register_plan(Gathered())
FORMULAS["gathered"] = GatheredFormula()
