# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient synchronisation between backward and the optimizer step.

There are two implementations. In the first, FSDP or DDP reduces the gradients and leaves them in
``parameter.grad``. In the second, the optimizer (TSR-Adam) takes them from there during
backward and reduces them itself.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.finite import nonfinite_gradient
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.training.grad_norm import gradient_norm


class Gradients(Protocol):
    """The gradients of one step; call the methods in this order."""

    def prepare(self, last: bool) -> None:
        """Start a micro-batch, before its forward pass; ``last`` marks the step's last."""

    def accumulate(self, last: bool) -> None:
        """Accumulate the gradients of one micro-batch, after its backward pass."""

    def synchronize(self) -> Tensor:
        """Reduce the gradients and return the norm of those that the optimizer will use.

        Returns:
            A scalar, equal on all ranks.
        """

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients in place if their ``norm`` exceeds ``max_norm``."""

    def nonfinite(self) -> str | None:
        """Name the first parameter with a gradient that is not finite on this rank."""


class StoredGradients:
    """Gradients that FSDP or DDP reduces into ``parameter.grad``.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
    """

    def __init__(self, model_parts: Sequence[nn.Module], pp_mesh: DeviceMesh | None) -> None:
        self.model_parts, self.pp_mesh = model_parts, pp_mesh

    def prepare(self, last: bool) -> None:
        """Do nothing: FSDP or DDP has its own hooks."""

    def accumulate(self, last: bool) -> None:
        """Do nothing: autograd accumulates in ``parameter.grad``."""

    def synchronize(self) -> Tensor:
        """Return the norm; the gradients are already reduced."""
        return gradient_norm(self._parameters(), self.pp_mesh)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale this rank's shards of the gradients in place."""
        shards = [local_part(p.grad) for p in self._parameters() if p.grad is not None]
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if shards:  # with CPU offload the gradients and the norm may be on different devices
            torch._foreach_mul_(shards, coefficient.to(shards[0].device))

    def nonfinite(self) -> str | None:
        """Name the first parameter with a gradient that is not finite on this rank."""
        return nonfinite_gradient(self.model_parts)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for part in self.model_parts for p in part.parameters()]


def gradients_for(
    optimizers: Any, model_parts: Sequence[nn.Module], pp_mesh: DeviceMesh | None
) -> Gradients:
    """Choose how gradients are reduced and clipped for these optimizers.

    Args:
        optimizers: torchtitan's optimizer container or TSR-Adam's.
        model_parts: The pipeline stages of this rank.
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
    """
    if isinstance(optimizers, TSROptimizers):
        return optimizers
    return StoredGradients(model_parts, pp_mesh)
