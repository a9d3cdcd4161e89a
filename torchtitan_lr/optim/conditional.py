# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An optimizer step that the device skips, without a read of the host.

The host would wait for the device between backward and the optimizer if it decided itself. The
verdict is passed as torch's `GradScaler` passes it, in the attribute ``found_inf``: fused Adam and
TSR-Adam then leave weights, moments and step counts as they are.
"""

from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.titan.components import OptimizersContainer


def step_unless(rejected: Tensor, optimizers: OptimizersContainer) -> None:
    """Step all optimizers, unless the step is rejected.

    Torch's ``foreach`` and ``for-loop`` implementations know no verdict, and weights that are
    offloaded are on another device. The host reads the verdict for these.

    Args:
        rejected: 1 to leave no trace of the step, else 0; an fp32 scalar on the training device.
        optimizers: One per model part.
    """
    parts: list[Any] = list(optimizers)
    if not all(_decides(part, rejected.device) for part in parts):
        if not rejected.item():
            optimizers.step()
        return
    for part in parts:
        part.found_inf = rejected
    try:
        optimizers.step()
    finally:
        for part in parts:
            del part.found_inf


def _decides(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer skips its step by a verdict on this device."""
    if getattr(optimizer, "takes_verdict", False):
        return True
    return all(
        group.get("fused", False) and all(local_part(p).device == device for p in group["params"])
        for group in optimizer.param_groups
    )
