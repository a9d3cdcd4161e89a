# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Adam and AdamW that update this rank's shards as plain tensors.

Adam is elementwise, so each shard can be updated alone. Torch's own step passes lists of DTensors
to the dispatcher, which looks up the placements of every parameter on the host in each step.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part


class ShardAdam(torch.optim.Adam):
    """`torch.optim.Adam` that updates local shards; its state stays DTensors, for checkpoints."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # Torch collects parameters, gradients and states here, then updates the collected tensors.
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


class ShardAdamW(ShardAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local shards."""


_ON_SHARDS = {torch.optim.Adam: ShardAdam, torch.optim.AdamW: ShardAdamW}


def step_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Turn torch's Adam or AdamW into its shard-local subclass; leave other optimizers alone."""
    optimizer.__class__ = _ON_SHARDS.get(type(optimizer), type(optimizer))
