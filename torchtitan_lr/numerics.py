# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norms and products that torch's own operators would round, or compute from a hidden copy.

On a CPU, and for fp64 on a GPU too, a reduction with another dtype first casts the whole tensor
within the kernel: `torch.linalg.vector_norm` of an fp32 tensor in fp64 takes memory for twice the
tensor.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dispatch import norms_of
from torchtitan_lr.compat.dtensor import local_part

BLOCK = 2**15  # entries that a CPU casts at a time; the fp64 copy stays in its cache


def blocks(tensor: Tensor, entries: int) -> Iterator[Tensor]:
    """Yield a tensor in views of at most ``entries``, in an order that shape and strides decide."""
    # A contiguous one is cut as if it were flat, others by rows.
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(entries)
        return
    for rows in tensor.split(max(1, entries * len(tensor) // tensor.numel())):
        if rows.numel() <= entries:
            yield rows
        else:  # a single long row
            yield from blocks(rows[0], entries)


@torch.no_grad()
def joint_norm(tensors: Iterable[Tensor], fp64: bool | None = None) -> Tensor:
    """Return the joint 2-norm of this rank's parts of some tensors, in at least fp32."""
    # By default the sum is in fp64, a plain scalar, if all tensors are on a CPU.
    parts = [local_part(tensor) for tensor in tensors]
    if fp64 is None:
        # On a CPU torch sums the squares of a large fp32 tensor sequentially, with an error of 2e-5
        # for a million entries that depends on the sharding.
        fp64 = all(part.device.type == "cpu" for part in parts)
    if not fp64:
        # Without a dtype, norms of bf16 tensors are rounded to bf16.
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms_of(parts, dtype)))
    # One buffer for all blocks: small results between new ones would fragment the heap.
    wide = parts[0].new_empty(BLOCK, dtype=torch.float64)
    square = wide.new_zeros(())
    for part in parts:
        for block in blocks(part, BLOCK):
            flat = wide[: block.numel()]
            flat.view(block.shape).copy_(block)
            square += flat.dot(flat)
    return square.sqrt()


def scale_(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply plain tensors in place by one scalar, in at least fp32; round the products alone."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for dtype, same in by_dtype.items():
        exact = factor.to(same[0].device, torch.promote_types(dtype, torch.float32))
        if dtype == exact.dtype or exact.device.type == "cpu":
            torch._foreach_mul_(same, exact)
            continue
        # A GPU's kernel rounds a factor without dimensions to bf16 before it multiplies. One with
        # dimensions raises the product to fp32, for which a CPU would copy the tensor.
        for tensor in same:
            tensor.mul_(exact.view([1] * tensor.ndim))


@contextmanager
def rounded_once(weights: Sequence[Tensor], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Yield weights in a dtype; what is written there is rounded to their own once, at the end."""
    # Each operator on a bf16 weight would round it. A weight of that dtype is yielded itself.
    exact = [weight.to(dtype) for weight in weights]
    yield exact
    for weight, wide in zip(weights, exact, strict=True):
        if weight is not wide:
            weight.copy_(wide)


@contextmanager
def exact_products() -> Iterator[None]:
    """Let products of fp32 matrices keep fp32's digits, also where the run allows TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class HostCopy:
    """Numbers of the device that the host reads later, without waiting for what follows them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._copied: torch.Event | None = None
        if numbers.device.type == "cuda":
            # Into pinned memory, else the host would wait for the device here.
            host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers = host.copy_(numbers, non_blocking=True)
            self._copied = torch.get_device_module(numbers.device).Event()
            self._copied.record()

    def read(self) -> list[Any]:
        """Return the numbers; waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers
