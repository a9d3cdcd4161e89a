# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The norm of the whole gradient, and clipping by it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torchtitan.distributed import utils as dist_utils


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, pp_mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``.

    On an accelerator this is torchtitan's. On a CPU torch sums a large fp32 tensor's squares one
    after the other and is off by 2e-5 (a million entries), differently for each sharding; there the
    squares are summed in fp64.

    Args:
        parameters: All parameters of this rank; their gradients may be DTensors.
        max_norm: The bound.
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.

    Returns:
        The norm before clipping, a plain scalar, equal on all ranks.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if any(p.device.type != "cpu" for p in parameters):
        return dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, pp_mesh=pp_mesh)
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters]
    total = torch.linalg.vector_norm(torch.stack(norms))
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if pp_mesh is not None:
        total = total.square()
        dist.all_reduce(total, group=pp_mesh.get_group())
        total = total.sqrt()
    clip_grads_with_norm_(parameters, max_norm, total)
    return total
