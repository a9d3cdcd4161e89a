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
from torchtitan_lr.parallel.paired import gather_from_ranks
from torchtitan_lr.parallel.plan_parts import Plan, normalize
from torchtitan_lr.parallel.plans import PLANS


class Gathered(Plan):
    factors = Shard(1), Shard(1)
    shards_heads = False

    def gathered(self, factors):
        return [gather_from_ranks(local(factor.weight), self.ranks) for factor in factors]

    def down(self, group, x, linears, norm):
        x = x if norm is None else normalize(x, norm)
        return down_products(x, self.gathered(linear.A for linear in linears))

    def up(self, group, latents, linears):
        weights = self.gathered(linear.B for linear in linears)
        pairs = zip(activated(latents, group.use_silu), weights, strict=True)
        return [F.linear(x, weight) for x, weight in pairs]


def gathered_traffic(shape, settings, n, ranks):
    blocks = [size for name, size in model_shapes(shape).items() if name.startswith("layers.0.")]
    block = [forward("all_gather", [prod(size) for size in blocks if len(size) == 2])]
    return FORMULAS["vanilla"](shape, settings, n, ranks) | {"block": block, "gates": []}


PLANS["gathered"] = Gathered
TP_PLANS.append("gathered")
FORMULAS["gathered"] = gathered_traffic
