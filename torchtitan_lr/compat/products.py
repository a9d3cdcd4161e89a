# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Matrix products of torch without a public name, and the precision of those that have one.

Tested with torch 2.11 and 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply integers of eight bits, with sums of 32 bits.

    Calls ``torch._int_mm``, which uses the processor's products of bytes; ``F.linear`` takes no
    integers. If it is gone or does not take the shapes, floats compute the same integers: their
    sums are exact up to 2^24, beyond which they round like any fp32 sum.

    Args:
        x: (b, d), int8.
        weight: (V, d), int8.

    Returns:
        Tensor (b, V), fp32.
    """
    product = getattr(torch, "_int_mm", None)
    if product is not None and x.device.type == "cpu":
        out: Tensor = product(x, weight.t()).float()
        return out
    return x.float() @ weight.float().t()


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let CUDA's fp32 products round their factors to TF32; other devices compute as before.

    Sets ``torch.backends.cuda.matmul.fp32_precision`` and restores it.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
