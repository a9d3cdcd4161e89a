# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The norm of the full gradient."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[torch.Tensor],
    pp_mesh: DeviceMesh | None = None,
    fp64: bool | None = None,
) -> torch.Tensor:
    """Return the joint 2-norm of all gradients.

    On a CPU torch sums the squares of a large fp32 tensor sequentially, with an error of 2e-5 for
    a million entries that depends on the sharding. The squares of CPU gradients are therefore
    summed in fp64.

    Args:
        parameters: All parameters of this rank; their gradients may be DTensors.
        pp_mesh: Pipeline ranks whose gradients belong to the same norm.
        fp64: Whether to sum the squares in fp64; by default only if all gradients are on a CPU.

    Returns:
        A plain scalar, equal on all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if fp64 is None:
        fp64 = all(gradient.device.type == "cpu" for gradient in gradients)
    if fp64:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        total = torch.linalg.vector_norm(torch.stack(norms))
    else:
        total = get_total_norm(gradients, foreach=True)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if pp_mesh is not None:
        total = total.square()
        dist.all_reduce(total, group=pp_mesh.get_group())
        total = total.sqrt()
    return total
