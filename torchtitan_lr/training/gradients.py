# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradients between backward and the optimizer step: their reduction, norm and clipping.

There are two implementations. In the first, FSDP or DDP reduces the gradients and leaves them in
``parameter.grad``. In the second, the optimizer (TSR-Adam) takes them from there during
backward and reduces them itself.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from torchtitan_lr.compat.dtensor import StridedShard, local_part
from torchtitan_lr.optim.finite import clip_factor, nonfinite_gradient
from torchtitan_lr.optim.tsr.optimizer import TSROptimizers


@dataclass
class StoredGradients:
    """Gradients that FSDP or DDP reduces into ``parameter.grad``.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
    """

    model_parts: Sequence[nn.Module]
    pp_mesh: DeviceMesh | None

    def prepare(self, last: bool = True) -> None:
        """Do nothing: FSDP or DDP has its own hooks, and autograd accumulates."""

    # Of a rejected step the fused Adam counts nothing on the host either.
    accumulate = undo_step_counters = prepare

    def repair_drift(self) -> None:
        """Do nothing: replicas compute nothing apart."""

    @torch.no_grad()
    def reduce_and_square_norm(self) -> Tensor:
        """Return this rank's share of the full gradient's squared norm, a plain fp64 scalar.

        The gradients are already reduced. The shares of all ranks add up to the square: a part of
        which several ranks hold a copy is divided by their number. The sum over ranks can thus
        travel with other sums in one collective.
        """
        stages = self.pp_mesh.size() if self.pp_mesh else 1  # each has parameters of its own
        ranks = dist.get_world_size() // stages if dist.is_initialized() else 1
        alike: dict[int, list[Tensor]] = defaultdict(list)
        for gradient in self._gradients():
            splits = 1
            if isinstance(gradient, DTensor):
                sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
                splits = math.prod(n for n, part in sizes if isinstance(part, Shard | StridedShard))
            alike[ranks // splits].append(gradient)
        shares = [gradient_norm(same).double().square() / n for n, same in alike.items()]
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale this rank's shards of the gradients in place, if the norm is finite."""
        shards = [local_part(gradient) for gradient in self._gradients()]
        coefficient = clip_factor(max_norm, norm)
        if shards:  # with CPU offload the gradients and the norm may be on different devices
            torch._foreach_mul_(shards, coefficient.to(shards[0]))

    def nonfinite(self) -> str | None:
        """Name the first parameter with a gradient that is not finite on this rank."""
        return nonfinite_gradient(self.model_parts)

    def _gradients(self) -> list[Tensor]:
        parameters = (p for part in self.model_parts for p in part.parameters())
        return [p.grad for p in parameters if p.grad is not None]


Gradients: TypeAlias = StoredGradients | TSROptimizers
"""The gradients of one step; each micro-batch has `prepare` before it and `accumulate` after it,
then come `reduce_and_square_norm` and `clip`, after the step `repair_drift` and, if the device has
rejected it, `undo_step_counters`."""


@torch.no_grad()
def gradient_norm(gradients: Iterable[Tensor], fp64: bool | None = None) -> Tensor:
    """Return the joint 2-norm of this rank's parts of some gradients.

    Args:
        gradients: Plain tensors or DTensors.
        fp64: Whether to sum in fp64, a plain scalar; by default if all gradients are on a CPU.
    """
    parts = [local_part(gradient) for gradient in gradients]
    if fp64 is None:
        # On a CPU torch sums the squares of a large fp32 tensor sequentially, with an error of 2e-5
        # for a million entries that depends on the sharding.
        fp64 = all(part.device.type == "cpu" for part in parts)
    if fp64:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return torch.linalg.vector_norm(torch.stack(norms))
    return get_total_norm(parts, foreach=True)
