# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Check that gradients and weights are finite, and clip those that are."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lr.checkpoints.manifest import all_finite
from torchtitan_lr.compat.dtensor import local_part


def nonfinite_gradient(model_parts: Iterable[nn.Module]) -> str | None:
    """Return the name of the first parameter with a non-finite gradient on this rank, or None."""
    for part in model_parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not torch.isfinite(local_part(gradient)).all():
                return name
    return None


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Return what scales a gradient down to ``max_norm``, as torch's ``clip_grad_norm_`` does.

    Returns:
        A scalar ≤ 1; 1 if the norm is not finite, so that the entry at fault can still be found.
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
