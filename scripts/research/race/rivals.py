# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The methods of the race that the package does not have, as values of ``optimizer.name``.

A run names this module by ``experimental.custom_import``. A run with DiLoCo needs torchft, see
``requirements.txt``. Dion has no package in an index.
"""

from scripts.research.race.diloco import diloco
from scripts.research.race.powersgd import powersgd
from scripts.research.race.tsr_variants import tsr_variant, with_feedback, with_polar_factors
from torchtitan_lr.training.register import register_optimizer

for rank in (2, 4):
    register_optimizer(f"PowerSGD-{rank}", powersgd(rank), sums_replicas=True, base="AdamW")

register_optimizer("TSR-feedback", tsr_variant(with_feedback), base="TSRAdam")
register_optimizer("TSR-Muon", tsr_variant(with_polar_factors), base="TSRAdam")

for every in (16, 64):
    register_optimizer(f"DiLoCo-{every}", diloco(every), sums_replicas=True, base="AdamW")
    name, streaming = f"StreamingDiLoCo-{every}", diloco(every, fragments=4)
    register_optimizer(name, streaming, sums_replicas=True, base="AdamW")
