# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the race's methods refuse, before a rank starts."""

from typing import Any

from torchtitan_lr.errors import require


def check_powersgd(config: Any, world_size: int, device_type: str) -> None:
    """Require replicas of a whole model, all of whose gradients are finite and not rounded.

    A rank that has a part of the matrices would approximate each part by itself, and the hook's
    error feedback would keep what is not finite.
    """
    name = f"optimizer.name = {config.optimizer.name!r}"
    replicas = config.parallelism.data_parallel_replicate_degree
    key = "parallelism.data_parallel_replicate_degree"
    want = f"the number of ranks ({world_size}), 2 or more, with {name}: each is a replica"
    require(replicas == world_size >= 2, key, replicas, want)
    wire = config.training.mixed_precision_reduce
    want = f"'float32' with {name}, which does not round what it sends"
    require(wire == "float32", "training.mixed_precision_reduce", wire, want)
    key, skipped = "training.max_skipped_steps", config.training.max_skipped_steps
    want = f"0 with {name}, whose error feedback would keep what is not finite"
    require(skipped == 0, key, skipped, want)
