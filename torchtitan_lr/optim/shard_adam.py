# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Adam and AdamW step on this rank's shards as plain tensors.

Adam is elementwise, so a shard needs nothing of the others. Torch's own step hands its lists of
DTensors to the dispatcher, which looks up the placements of every parameter, on the host and in
each step.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part


class ShardAdam(torch.optim.Adam):
    """`torch.optim.Adam` whose step sees shards; its state stays DTensors, for checkpoints."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # Torch collects parameters, gradients and states here, and steps on what it collected.
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


class ShardAdamW(ShardAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` in the same way."""


_ON_SHARDS = {torch.optim.Adam: ShardAdam, torch.optim.AdamW: ShardAdamW}


def step_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Change torch's Adam or AdamW into the class that steps on shards; leave others alone.

    Args:
        optimizer: Before its first step.
    """
    optimizer.__class__ = _ON_SHARDS.get(type(optimizer), type(optimizer))
