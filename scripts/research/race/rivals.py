# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The methods of the race that the package does not have, as values of ``optimizer.name``.

A run names this module by ``experimental.custom_import``. Dion has no package in an index.
"""

from functools import partial

from scripts.research.race.checks import check_powersgd
from scripts.research.race.powersgd import PowerSGDCost, powersgd
from torchtitan_lr.optim.entries import register_optimizer, variant

for rank in (2, 4):
    name, cost = f"PowerSGD-{rank}", partial(PowerSGDCost, rank=rank)
    facts = {"check": check_powersgd, "sums_replicas": True, "cost": cost}
    register_optimizer(variant("AdamW", name, powersgd(rank), **facts))
