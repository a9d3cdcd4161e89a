# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Check that gradients and weights are finite."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lr.compat.dtensor import local_part


def nonfinite_gradient(model_parts: Iterable[nn.Module]) -> str | None:
    """Return the name of the first parameter with a non-finite gradient on this rank, or None."""
    for part in model_parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not torch.isfinite(local_part(gradient)).all():
                return name
    return None


def finite_weights(model_parts: Iterable[nn.Module]) -> bool:
    """Return whether every parameter on every rank has a finite norm; call it on every rank.

    Weights whose squares overflow count as non-finite, because every norm over them is infinite.

    Args:
        model_parts: This rank's parts of the model.
    """
    norms = [
        torch.linalg.vector_norm(local_part(parameter).detach().float())
        for part in model_parts
        for parameter in part.parameters()
    ]
    finite = torch.stack(norms).isfinite().all().to(torch.int32)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite.item())
