# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sums over ranks that send half precision and add in fp32.

An all-reduce adds in the dtype that it sends. CAAT-Net adds the gradients of its partial reduction
in fp32 (section 4) and sends them in bf16: an all-to-all gives each rank all terms of its slice,
the rank adds them and rounds once, and an all-gather distributes the sums. The volume equals that
of an all-reduce.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.parallel.tensor.collectives import Ranks, all_gather, functional, wait


def wide_reduce_scatter(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Sum the ranks' tensors in fp32 or better; each rank keeps its slice of ``dim``.

    Args:
        x: One rank's term; ``dim`` divides by the ranks.
        ranks: The tensor-parallel ranks.
        dim: The scattered dimension.

    Returns:
        This rank's slice of the sum, in the dtype of x.
    """
    dim %= x.ndim
    slices = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0).contiguous()  # (T, ...)
    sizes = [1] * ranks.size
    terms = wait(functional.all_to_all_single(slices, sizes, sizes, ranks.group))
    return terms.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def wide_all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Sum the ranks' tensors in fp32 or better; return the sum in the dtype of x on every rank."""
    flat = x.flatten()
    padded = F.pad(flat, (0, -flat.numel() % ranks.size))
    total = all_gather(wide_reduce_scatter(padded, ranks, 0), ranks, 0)
    return total[: flat.numel()].view(x.shape)
