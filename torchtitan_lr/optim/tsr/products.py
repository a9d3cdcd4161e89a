# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The products that TSR-Adam makes in every step, in the chosen precision of their factors.

They are UᵀGV, which projects a gradient, and UDVᵀ, which lifts a direction. Sums are fp32 in every
precision. Refreshes are not concerned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bfloat16"]
"""Values of ``tsr_product_precision``."""


def multiply(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """Multiply matrices whose entries are rounded first, with sums in fp32.

    Args:
        a: (m, k), in fp32 or wider.
        b: (k, n), of the same dtype.
        precision: ``float32`` rounds nothing, ``tf32`` to 11 significant bits (on CUDA; elsewhere
            torch rounds nothing), ``bfloat16`` to 8.

    Returns:
        Tensor (m, n) of the factors' dtype.
    """
    if precision == "tf32":
        with tf32_products():
            return a @ b
    if precision == "float32":
        return a @ b
    dtype, a, b = a.dtype, a.to(torch.bfloat16), b.to(torch.bfloat16)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
    # Products of bf16 numbers are exact in fp32. A bf16 product here would round its sums.
    return (a.float() @ b.float()).to(dtype)


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let CUDA's fp32 products round their factors to TF32; other devices compute as before."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
