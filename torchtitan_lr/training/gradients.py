# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient synchronisation between backward and the optimizer step.

There are two implementations. In the first, FSDP or DDP reduces the gradients and leaves them in
``parameter.grad``. In the second, the optimizer (TSR-Adam) takes them from there during
backward and reduces them itself.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.finite import clip_factor, nonfinite_gradient
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers
from torchtitan_lr.training.grad_norm import square_share


class StoredGradients:
    """Gradients that FSDP or DDP reduces into ``parameter.grad``.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
    """

    def __init__(self, model_parts: Sequence[nn.Module], pp_mesh: DeviceMesh | None) -> None:
        self.model_parts, self.pp_mesh = model_parts, pp_mesh

    def prepare(self, last: bool) -> None:
        """Do nothing before a micro-batch: FSDP or DDP has its own hooks."""

    def accumulate(self, last: bool) -> None:
        """Do nothing: autograd accumulates in ``parameter.grad``."""

    def reduce_and_square_norm(self) -> Tensor:
        """Return this rank's share of the squared norm; the gradients are already reduced."""
        return square_share(self._gradients(), self.pp_mesh.size() if self.pp_mesh else 1)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale this rank's shards of the gradients in place, if the norm is finite."""
        shards = [local_part(gradient) for gradient in self._gradients()]
        coefficient = clip_factor(max_norm, norm)
        if shards:  # with CPU offload the gradients and the norm may be on different devices
            torch._foreach_mul_(shards, coefficient.to(shards[0]))

    def undo_step_counters(self) -> None:
        """Do nothing: a rejected step of Adam counts nothing on the host."""

    def nonfinite(self) -> str | None:
        """Name the first parameter with a gradient that is not finite on this rank."""
        return nonfinite_gradient(self.model_parts)

    def _gradients(self) -> list[Tensor]:
        parameters = (p for part in self.model_parts for p in part.parameters())
        return [p.grad for p in parameters if p.grad is not None]


Gradients: TypeAlias = StoredGradients | TSROptimizers
"""The gradients of one step; each micro-batch has `prepare` before it and `accumulate` after it,
then come `reduce_and_square_norm`, `clip` and, if the device has rejected the step,
`undo_step_counters`."""


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
