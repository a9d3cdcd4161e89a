# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norm and clipping of a step's gradients."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import StridedShard, local_part
from torchtitan_lr.numerics import joint_norm, scale_


@dataclass
class StoredGradients:
    """The gradients of a step, of all model parts of a rank, as FSDP2 reduces them.

    They are in ``parameter.grad`` before backward ends. An optimizer that sums over the replicas
    itself has an object with the same methods in their place: `TSRAdam`.

    `Trainer.train_step` calls the methods in their order here, `micro_batch` once per micro-batch,
    all of them on every rank. Weights and moments change between `clip` and `settle` alone, in the
    optimizers' own ``step``; TSR-Adam counts its steps, and repairs drift, in `settle`. An
    optimizer that leaves a rejected step out by itself may communicate there: its ``step`` is
    called on every rank in a rejected step too (`training.verdict.step_unless`).
    """

    model_parts: Sequence[nn.Module]  # the pipeline stages of this rank (one without pipelining)
    pp_mesh: DeviceMesh | None  # pipeline ranks whose gradients belong to the same norm
    replicas: int = 1  # those that have gradients, and so norms, of their own

    usual = True
    """Whether the running step's passes use gradients as those of other steps do."""

    def begin(self) -> None:
        """Start a step; no parameter has a gradient, and autograd accumulates."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of a micro-batch; ``last`` is the step's last one."""
        return nullcontext()  # FSDP2 has hooks of its own

    @torch.no_grad()
    def finish_sums(self) -> Tensor:
        """Wait for sums over the ranks that still run; return this rank's share of the norm.

        The shares of all ranks of a replica that has gradients of its own, else of all ranks, plain
        fp64 scalars, add up to the square of the full gradient's norm, so that the sum can travel
        with other sums in one collective.
        """
        pieces = [(gradient, splits_of(gradient)) for gradient in self._gradients()]
        stages = self.pp_mesh.size() if self.pp_mesh else 1
        return share_of_square(pieces, stages * self.replicas)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the summed gradients in place to at most ``max_norm``, if the norm is finite."""
        scale_(map(local_part, self._gradients()), clip_factor(max_norm, norm))

    def settle(self, rejected: bool) -> None:
        """Finish a step whose verdict the host has read: here nothing has counted it."""

    def nonfinite(self, part: nn.Module) -> list[str]:
        """Return the names of a part's parameters whose gradient is not finite on this rank."""
        names = []
        for name, p in part.named_parameters():
            if p.grad is not None and not torch.isfinite(local_part(p.grad)).all():
                names.append(clean_name(name))
        return names

    def _gradients(self) -> list[Tensor]:
        parameters = (p for part in self.model_parts for p in part.parameters())
        return [p.grad for p in parameters if p.grad is not None]


def splits_of(tensor: Tensor) -> int:
    """Return the number of ranks that a tensor is split over."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(n for n, part in sizes if isinstance(part, Shard | StridedShard))


def share_of_square(pieces: Iterable[tuple[Tensor, int]], parts: int) -> Tensor:
    """Return this rank's share of the square of a norm, fp64; the shares of all ranks add up to it.

    ``pieces`` are this rank's tensors, each with the number of ranks that it is split over; what
    several ranks hold alike is divided by their number. The ranks are ``parts`` of equal size that
    have tensors of their own: pipeline ranks, and replicas that train apart.
    """
    ranks = dist.get_world_size() // parts if dist.is_initialized() else 1
    alike: dict[int, list[Tensor]] = defaultdict(list)
    for piece, splits in pieces:
        alike[ranks // splits].append(piece)
    shares = [joint_norm(same).double().square() / n for n, same in alike.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Return what scales a gradient down to ``max_norm``: ≤ 1, as in torch's ``clip_grad_norm_``.

    It is 1 if the norm is not finite, so that the entry at fault can still be found.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # `torch.where` would copy the number 1 to the device.
    return factor.masked_fill(~norm.isfinite(), 1.0)
