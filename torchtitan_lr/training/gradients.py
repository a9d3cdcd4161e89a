# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a trainer does with gradients between backward and the optimizer step.

There are two ways: gradients that the wrappers sum and that wait in ``parameter.grad``, and those
that an optimizer takes from there after each micro-batch and sums itself (TSR-Adam).
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
    """The gradients of a step, in this order of calls."""

    def accumulate(self, last: bool) -> None:
        """Take over the gradients of one micro-batch; ``last`` is the step's last."""

    def synchronize(self) -> Tensor:
        """Return the norm of what the optimizer will use, a scalar, equal on all ranks."""

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale what the optimizer will use from a norm down to another."""

    def nonfinite(self) -> str | None:
        """Name the first parameter with a gradient that is not finite on this rank."""


class StoredGradients:
    """Gradients that the wrappers leave summed in ``parameter.grad``.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
    """

    def __init__(self, model_parts: Sequence[nn.Module], pp_mesh: DeviceMesh | None) -> None:
        self.model_parts, self.pp_mesh = model_parts, pp_mesh

    def accumulate(self, last: bool) -> None:
        """Do nothing: autograd has added them up."""

    def synchronize(self) -> Tensor:
        """Return the norm; the wrappers have summed the gradients."""
        return gradient_norm(self._parameters(), self.pp_mesh)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale this rank's shards of the gradients in place."""
        shards = [local_part(p.grad) for p in self._parameters() if p.grad is not None]
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if shards:  # with CPU offload they may lie on another device than the norm
            torch._foreach_mul_(shards, coefficient.to(shards[0].device))

    def nonfinite(self) -> str | None:
        """Name the first parameter with a gradient that is not finite on this rank."""
        return nonfinite_gradient(self.model_parts)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for part in self.model_parts for p in part.parameters()]


def gradients_of(
    optimizers: Any, model_parts: Sequence[nn.Module], pp_mesh: DeviceMesh | None
) -> Gradients:
    """Return the way of these optimizers.

    Args:
        optimizers: A container of optimizers, torchtitan's or TSR-Adam's.
        model_parts: The pipeline stages of this rank.
        pp_mesh: Pipeline ranks.
    """
    if isinstance(optimizers, TSROptimizers):
        return optimizers
    return StoredGradients(model_parts, pp_mesh)
