# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Norms and products that torch's own operators would round, or compute from a hidden copy.

On a CPU, and for fp64 on a GPU too, a reduction with another dtype first casts the whole tensor
within the kernel: `torch.linalg.vector_norm` of an fp32 tensor in fp64 takes memory for twice the
tensor.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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
        if dtype == exact.dtype or exact.device.type != "cuda":
            torch._foreach_mul_(same, exact)
            continue
        # A GPU's kernel rounds a factor without dimensions to bf16 before it multiplies. One with
        # dimensions raises the product to fp32, for which a CPU would copy the tensor.
        for tensor in same:
            tensor.mul_(exact.view([1] * tensor.ndim))


@contextmanager
def rounded_once(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield weights in at least fp32; what is written there is rounded once, at the end."""
    # Each operator on a bf16 weight would round it. A weight of a wider dtype is yielded itself.
    exact = [weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
    yield exact
    for weight, wide in zip(weights, exact, strict=True):
        if weight is not wide:
            weight.copy_(wide)


_SPLITS: ContextVar[bool] = ContextVar("splits", default=False)


@contextmanager
def exact_products(split: bool = False) -> Iterator[None]:
    """Let products of fp32 matrices keep fp32's digits, also where the run allows TF32.

    With ``split`` those of `sides` have 16 of the 24 bits.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    token = _SPLITS.set(split)
    try:
        yield
    finally:
        _SPLITS.reset(token)
        torch.set_float32_matmul_precision(before)


def sides(x: Tensor, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    """Return what stands for x (..., m, k) on the left of a product, and for xᵀ on the right.

    By rounding a ``symmetric`` x differs from xᵀ: on the right stands x itself, but not if products
    are split. Then x = hi + lo in bf16, and both are views of [hi hi lo hi] (..., m, 4k): of the
    first three blocks, and of the last three. So one product of width 3k is hi hi + hi lo + lo hi.
    """
    if not _SPLITS.get() or x.dtype != torch.float32:
        return x, x if symmetric else x.mT
    k = x.shape[-1]
    if x.stride(-1) == 1:
        blocks = x.new_empty((*x.shape[:-1], 4 * k), dtype=torch.bfloat16)
    else:  # as x lies in memory
        blocks = x.mT.new_empty((*x.mT.shape[:-2], 4 * k, x.shape[-2]), dtype=torch.bfloat16).mT
    blocks.unflatten(-1, (4, k)).copy_(x.unsqueeze(-2))
    torch.sub(x, blocks.narrow(-1, 0, k), out=blocks.narrow(-1, 2 * k, k))
    return blocks.narrow(-1, 0, 3 * k), blocks.narrow(-1, k, 3 * k).mT


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of one matrix's left side and another one's right side, in fp32."""
    if left.dtype != torch.bfloat16 or not _SPLITS.get():
        return left @ right
    if left.device.type == "cpu":  # the same numbers: in fp32 a product of two in bf16 is exact
        return left.float() @ right.float()
    multiply: Any = torch.mm if left.ndim == 2 else torch.bmm
    total: Tensor = multiply(left, right, out_dtype=torch.float32)
    return total


def plus_product(term: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Return β term + α left right, of stacks (b, m, n)."""
    if left.dtype == term.dtype:
        return torch.baddbmm(term, left, right, beta=beta, alpha=alpha)
    return (beta * term).add_(product(left, right), alpha=alpha)


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """Add α left right to a matrix (m, n)."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=alpha)
    else:
        total.add_(product(left, right), alpha=alpha)


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
