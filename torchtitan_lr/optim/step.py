# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""From gradients to weights: their norm, clipping, and a step that the device skips if it is bad.

There are two implementations of the gradients of a step. In `StoredGradients`, FSDP or DDP reduces
them and leaves them in ``parameter.grad``. TSR-Adam (`optim.tsr`) takes them from there during
backward and reduces them itself.

The host would wait for the device between backward and the optimizer if it decided itself about a
bad step. The verdict is passed as torch's `GradScaler` passes it, in the attribute ``found_inf``:
fused Adam and TSR-Adam then leave weights, moments and step counts as they are.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.checkpoints.manifest import all_finite
from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import StridedShard, local_part
from torchtitan_lr.numerics import joint_norm, scale_
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


@dataclass
class StoredGradients:
    """Gradients that FSDP or DDP reduces into ``parameter.grad``.

    Each micro-batch has `prepare` before it and `accumulate` after it. Then come
    `reduce_and_square_norm` and `clip`, after the step `repair_drift`, and, if the device has
    rejected it, `undo_step_counters`.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
    """

    model_parts: Sequence[nn.Module]
    pp_mesh: DeviceMesh | None

    def prepare(self, last: bool = True) -> None:
        """Do nothing: FSDP or DDP has its own hooks, and autograd accumulates."""

    # Of a rejected step the fused Adam counts nothing on the host either, and replicas compute
    # nothing apart.
    accumulate = undo_step_counters = repair_drift = prepare

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
        shares = [joint_norm(same).double().square() / n for n, same in alike.items()]
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale this rank's shards of the gradients in place, if the norm is finite."""
        scale_(map(local_part, self._gradients()), clip_factor(max_norm, norm))

    def nonfinite(self, part: nn.Module) -> list[str]:
        """Return the names of a part's parameters whose gradient is not finite on this rank."""
        return nonfinite_gradients(part)

    def _gradients(self) -> list[Tensor]:
        parameters = (p for part in self.model_parts for p in part.parameters())
        return [p.grad for p in parameters if p.grad is not None]


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Return what scales a gradient down to ``max_norm``: ≤ 1, as in torch's ``clip_grad_norm_``.

    It is 1 if the norm is not finite, so that the entry at fault can still be found.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # `torch.where` would copy the number 1 to the device.
    return factor.masked_fill(~norm.isfinite(), 1.0)


def nonfinite_gradients(part: nn.Module) -> list[str]:
    """Return the names of a part's parameters whose gradient is not finite on this rank."""
    gradients = ((clean_name(name), p.grad) for name, p in part.named_parameters())
    return [n for n, g in gradients if g is not None and not torch.isfinite(local_part(g)).all()]


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
