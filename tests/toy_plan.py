# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A tensor-parallel plan from outside the package: ``gathered``.

Each rank stores 1/T of every factor, gathers it where it is applied, and repeats the whole block.
A run names this module by ``experimental.custom_import``.
"""

from math import prod

import torch.nn.functional as F
from torch.distributed.tensor import Shard

import torchtitan_lr.training.register  # noqa: F401  # the models, as the default module does
from torchtitan_lr.collectives import Edge, gather_replicated, local
from torchtitan_lr.formulas.data_parallel import named_parameters
from torchtitan_lr.formulas.tensor_parallel import FORMULAS, PlanFormula
from torchtitan_lr.formulas.traffic import forward
from torchtitan_lr.models.ends import EmbedEdge
from torchtitan_lr.models.linears import MixEdge
from torchtitan_lr.models.norms import down_products, normalize
from torchtitan_lr.parallel import plans


class GatheredEdge(Edge):
    def whole(self, factor):
        return gather_replicated(local(factor.weight), self.ranks, 0)


class GatheredDownEdge(GatheredEdge):
    def forward(self, x, linears, norm=None):
        x = x if norm is None else normalize(x, norm)
        return down_products(x, [self.whole(linear.A) for linear in linears])


class GatheredUpEdge(GatheredEdge):
    def forward(self, latents, linears):
        pairs = zip(latents, linears, strict=True)
        return [F.linear(x, self.whole(linear.B)) for x, linear in pairs]


def gathered(args, settings):
    down, up = plans.on_ranks(GatheredDownEdge), plans.on_ranks(GatheredUpEdge)
    blocks = plans.low_rank_blocks(args, settings, down, up, plans.on_ranks(MixEdge))
    embed = plans.on_ranks(EmbedEdge, gather=True)
    return blocks | plans.model_ends(settings, embed)


def gathered_traffic(shape, settings, n, ranks):
    factors = named_parameters(shape, settings, 1)["block 0"].values()
    block = [forward("all_gather", [prod(size) for size in factors if len(size) == 2])]
    ends = FORMULAS["vanilla"].traffic(shape, settings, n, ranks)
    return ends | {"block": block}


plans.register_plan(
    "gathered", plans.Plan(gathered, factors=(Shard(0), Shard(0)), shards_heads=False)
)
FORMULAS["gathered"] = PlanFormula(gathered_traffic, shards_heads=False, factors=(0, 0))
