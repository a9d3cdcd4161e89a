# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A tensor-parallel plan from outside the package: ``gathered``.

Each rank stores 1/T of every factor, gathers it where it is applied, and repeats the whole block.
A run names this module by ``experimental.custom_import``.
"""

from math import prod

import torch.nn.functional as F
from torch.distributed.tensor import Shard

from torchtitan_lr.collectives import local
from torchtitan_lr.config.schema import TP_PLANS
from torchtitan_lr.costs.messages import forward
from torchtitan_lr.costs.tp_messages import FORMULAS
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.linears import activated, down_products
from torchtitan_lr.parallel.edge import (
    Edge,
    EmbedEdge,
    HeadEdge,
    MixEdge,
    gather_from_ranks,
    normalize,
)
from torchtitan_lr.parallel.plan_parts import Plan, low_rank_blocks, model_ends, on_ranks
from torchtitan_lr.parallel.plans import PLANS


class GatheredEdge(Edge):
    def whole(self, factor):
        return gather_from_ranks(local(factor.weight), self.ranks)


class GatheredDownEdge(GatheredEdge):
    def forward(self, x, linears, norm=None):
        x = x if norm is None else normalize(x, norm)
        return down_products(x, [self.whole(linear.A) for linear in linears])


class GatheredUpEdge(GatheredEdge):
    def forward(self, latents, linears, use_silu):
        pairs = zip(activated(latents, use_silu), linears, strict=True)
        return [F.linear(x, self.whole(linear.B)) for x, linear in pairs]


def gathered(args, settings):
    down, up = on_ranks(GatheredDownEdge), on_ranks(GatheredUpEdge)
    blocks = low_rank_blocks(args, GATHERED, down, up, on_ranks(MixEdge, sharded=False))
    head = on_ranks(HeadEdge, loss_parallel=settings.loss_parallel)
    return blocks | model_ends(on_ranks(EmbedEdge), head)


def gathered_traffic(shape, settings, n, ranks):
    blocks = [size for name, size in model_shapes(shape).items() if name.startswith("layers.0.")]
    block = [forward("all_gather", [prod(size) for size in blocks if len(size) == 2])]
    return FORMULAS["vanilla"](shape, settings, n, ranks) | {"block": block, "gates": []}


FACTORS = Shard(1), Shard(1)
GATHERED = Plan(gathered, attention=FACTORS, feed_forward=FACTORS, shards_heads=False)
PLANS["gathered"] = GATHERED
TP_PLANS.append("gathered")
FORMULAS["gathered"] = gathered_traffic
