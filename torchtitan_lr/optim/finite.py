# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bad steps: find what is not finite, clip, and skip the step on the device without a host sync.

The host would wait for the device between backward and the optimizer if it decided itself. The
verdict is passed as torch's `GradScaler` passes it, in the attribute ``found_inf``: fused Adam and
TSR-Adam then leave weights, moments and step counts as they are.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lr.checkpoints.manifest import all_finite
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.titan.components import OptimizersContainer


class HostCopy:
    """Numbers of the device that the host reads later, without waiting for what follows them.

    Args:
        numbers: The numbers; they are copied when the device has them.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._copied: torch.Event | None = None
        if numbers.device.type != "cpu":
            self._start()

    def _start(self) -> None:
        # Into pinned memory, else the host would wait for the device here.
        host = torch.empty_like(self._numbers, device="cpu", pin_memory=True)
        device = torch.get_device_module(self._numbers.device)
        self._numbers = host.copy_(self._numbers, non_blocking=True)
        self._copied = device.Event()
        self._copied.record()

    def read(self) -> list[Any]:
        """Return the numbers; waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers


def nonfinite_gradient(model_parts: Iterable[nn.Module]) -> str | None:
    """Return the name of the first parameter with a non-finite gradient on this rank, or None."""
    for part in model_parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not torch.isfinite(local_part(gradient)).all():
                return name
    return None


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Return what scales a gradient down to ``max_norm``: ≤ 1, as in torch's ``clip_grad_norm_``.

    It is 1 if the norm is not finite, so that the entry at fault can still be found.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # `torch.where` would copy the number 1 to the device.
    return factor.masked_fill(~norm.isfinite(), 1.0)


def finite_weights(model_parts: Iterable[nn.Module]) -> bool:
    """Return whether every parameter on every rank has a finite norm; call it on every rank."""
    weights = [local_part(p).detach() for part in model_parts for p in part.parameters()]
    finite = torch.tensor(all_finite(weights), dtype=torch.int32, device=weights[0].device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite.item())


def step_unless(rejected: Tensor, optimizers: OptimizersContainer) -> None:
    """Step all optimizers, unless the step is rejected.

    Torch's ``foreach`` and ``for-loop`` implementations know no verdict, and weights that are
    offloaded are on another device. The host reads the verdict for these.

    Args:
        rejected: 1 to leave no trace of the step, else 0; an fp32 scalar on the training device.
        optimizers: One per model part.
    """
    parts: list[Any] = list(optimizers)
    device = rejected.device
    reads_verdict = all(
        getattr(part, "takes_verdict", False)
        or all(
            group.get("fused", False)
            and all(local_part(p).device == device for p in group["params"])
            for group in part.param_groups
        )
        for part in parts
    )
    if not reads_verdict:
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
