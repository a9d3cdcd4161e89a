# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Adam and AdamW on shards."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part


class ShardAdam(torch.optim.Adam):
    """`torch.optim.Adam` that updates local shards; its state stays DTensors, for checkpoints.

    Adam is elementwise, so each shard can be updated alone. Torch's own step passes lists of
    DTensors to the dispatcher, which looks up the placements of every parameter on the host.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # Torch collects parameters, gradients and states here, then updates the collected tensors.
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


class ShardAdamW(ShardAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` that updates local shards."""


ON_SHARDS = {torch.optim.Adam: ShardAdam, torch.optim.AdamW: ShardAdamW}
"""The shard-local subclass of each of torch's optimizers."""
