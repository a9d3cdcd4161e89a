# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The precision of torch's matrix products. Tested with torch 2.11 and 2.13."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let CUDA's fp32 products round their factors to TF32; other devices compute as before."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
