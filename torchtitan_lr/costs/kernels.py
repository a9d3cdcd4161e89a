# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Record the kernels of a run on fake tensors: products, attention and element-wise work.

The recorder sees every operator below autograd, backward and recomputation included.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat import dispatch
from torchtitan_lr.compat.fake import RehearsalMode, rms_norm_by

_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_ATTENTION = tuple({str(op.overloadpacket).split(".")[-1] for op in dispatch.ATTENTION_OPERATORS})
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Operators, and the position of their first factor."""
_PICKS = ("gather", "embedding")  # operators that read of a table as much as they return
_SPREADS = {"scatter_add_": 3}
"""Operators that change as much of a table as they add, and the position of what they add."""


@dataclass(frozen=True)
class Product:
    """A matrix product (m, k) by (k, n), or a batch of them."""

    batch: int  # number of products
    m: int
    n: int
    k: int  # length of the sums
    itemsize: int  # bytes per element

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes of the factors and of the result, each passed over memory once."""
        sides = self.m * self.k + self.k * self.n + self.m * self.n
        return self.batch * sides * self.itemsize


@dataclass(frozen=True)
class Work:
    """Work of a device: for a block, for the ends of a model, or for a whole step."""

    products: Counter[Product] = field(default_factory=Counter)  # calls by shape
    # FLOPs of fused attention; the masked half of the scores is not computed
    attention: float = 0.0
    traffic: float = 0.0  # bytes that the other kernels read and write
    kernels: float = 0.0  # number of kernels, products and attention included

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """Return this work and ``times`` the other."""
        products = Counter(self.products)
        for product, calls in other.products.items():
            products[product] += times * calls  # type: ignore[assignment]
        return Work(
            Counter({product: calls for product, calls in products.items() if calls}),
            self.attention + times * other.attention,
            self.traffic + times * other.traffic,
            self.kernels + times * other.kernels,
        )


_Sizes = dict[tuple[int, int], int]  # bytes by storage and offset


@dataclass
class _Operator:
    backward: bool
    reads: _Sizes
    writes: _Sizes
    product: Product | None = None
    attention: float = 0.0
    extern: bool = False  # whether no compiler fuses it: a product, attention or a collective
    counted: bool = True


class KernelRecorder(RehearsalMode):
    """Records operators and what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.backward = False  # set by the caller when backward begins
        self._operators: list[_Operator] = []
        self._held: list[torch.UntypedStorage] = []  # so that no address is used again
        self._ids: dict[int, int] = {}

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        # A tensor into which an operator writes its result is no input.
        named = {name: value for name, value in kwargs.items() if name != "out"}
        inputs = (args[1:] if func is torch.ops.aten.copy_.default else args, named)
        # An operator on a list in place returns nothing.
        results = args[0] if out is None and "_foreach" in str(func) else out
        self._record(func, dispatch.tree_leaves(inputs), dispatch.tree_leaves(results), args)

    def _record(self, func: Any, inputs: list[Any], outputs: list[Any], args: Any) -> None:
        reads, writes = self._sizes(inputs), self._sizes(outputs)
        namespace, _, name = str(func).rpartition(".")[0].rpartition(".")
        if not writes or name in _ALLOCATIONS:
            return
        if namespace not in ("aten", "prims") and "c10d" not in namespace:
            # A mark of checkpointing: an identity that a compiler removes.
            for (new, _), (old, _) in zip(writes, reads, strict=False):
                self._ids[new] = old
            return
        known = {storage for storage, _ in reads}
        if not dispatch.changes_arguments(func) and all(storage in known for storage, _ in writes):
            return  # a view
        if name in _PICKS:
            reads = _at_most(reads, sum(writes.values()))
        elif name in _SPREADS:
            added = args[_SPREADS[name]]
            size = added.numel() * added.element_size()
            reads, writes = _at_most(reads, size), _at_most(writes, size)
        operator = _Operator(self.backward, reads, writes)
        if "c10d" in namespace:
            operator.extern, operator.counted = True, False
        elif name in _PRODUCTS:
            first = _PRODUCTS[name]
            operator.product, operator.extern = _product(args[first], args[first + 1]), True
        elif name.startswith(_ATTENTION):
            operator.attention, operator.extern = _attention_flops("backward" in name, args), True
        self._operators.append(operator)

    def record(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record a kernel that no operator of this machine stands for."""
        self._operators.append(_Operator(self.backward, self._sizes(reads), self._sizes(writes)))

    def _sizes(self, leaves: list[Any]) -> _Sizes:
        sizes: _Sizes = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                address = dispatch.storage_address(storage)
                if address not in self._ids:
                    self._ids[address] = address
                    self._held.append(storage)
                whole = min(leaf.numel() * leaf.element_size(), storage.nbytes())
                key = self._ids[address], int(leaf.storage_offset())
                sizes[key] = max(sizes.get(key, 0), whole)
        return sizes

    def work(self, backward: bool, fused: bool) -> Work:
        """Return the work of a pass."""
        mine = [operator for operator in self._operators if operator.backward == backward]
        products = Counter(o.product for o in mine if o.product is not None)
        attention = sum(operator.attention for operator in mine)
        heavy = sum(o.extern and o.counted for o in mine)
        if fused:
            traffic, kernels = self._fused(backward)
        else:
            others = [operator for operator in mine if not operator.extern]
            traffic = sum(sum(o.reads.values()) + sum(o.writes.values()) for o in others)
            kernels = len(others)
        return Work(products, attention, float(traffic), float(heavy + kernels))

    def _fused(self, backward: bool) -> tuple[int, int]:
        """Return bytes and kernels where each run of element-wise operators is one kernel.

        A kernel writes what a product or a collective reads. What only other kernels read, they
        compute again from the inputs of its maker, as the partitioner of a compiler does.
        """
        kernels = _runs(self._operators)
        needed: set[int] = set()  # what products and collectives read
        for operator in self._operators:
            if operator.extern:
                needed.update(key[0] for key in operator.reads)
        makers: dict[int, _Kernel] = {}  # which kernel writes a result
        for kernel in kernels:
            makers |= {key[0]: kernel for key in kernel.writes}
        mine = [kernel for kernel in kernels if kernel.backward == backward]
        traffic = 0
        for kernel in mine:
            reads: _Sizes = {}
            for key, size in kernel.reads.items():
                maker = makers.get(key[0], kernel)
                if maker is kernel or key[0] in needed:
                    reads[key] = size
                else:
                    reads.update(maker.reads)
            kept = {key: size for key, size in kernel.writes.items() if key[0] in needed}
            last = max(kernel.writes.values(), default=0)
            traffic += sum(reads.values()) + (sum(kept.values()) or min(last, kernel.last))
        return traffic, len(mine)


@dataclass
class _Kernel:
    backward: bool
    reads: _Sizes = field(default_factory=dict)
    writes: _Sizes = field(default_factory=dict)
    last: int = 0


def _product(a: Tensor, b: Tensor) -> Product:
    """Return the product of factors (..., m, k) and (..., k, n)."""
    sides = a.shape[-2], b.shape[-1], a.shape[-1]
    return Product(prod(a.shape[:-2]), *sides, a.element_size())


def _attention_flops(backward: bool, args: Any) -> float:
    """Return the FLOPs of fused attention, whose factors (b, h, s, e) are among its arguments."""
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    # Two products forward, five backward, which computes the scores again: each below the
    # diagonal. With fewer queries it ends in the lower right.
    each = float(query.numel() * (2 * key.shape[-2] - query.shape[-2]))
    return (5 if backward else 2) * each


def _runs(operators: list[_Operator]) -> list[_Kernel]:
    """Join operators between two that no compiler fuses."""
    kernels: list[_Kernel] = []
    fresh = True
    for operator in operators:
        if operator.extern:
            fresh = True
            continue
        if fresh or kernels[-1].backward != operator.backward:
            kernels.append(_Kernel(operator.backward))
            fresh = False
        kernel = kernels[-1]
        made = {storage for storage, _ in kernel.writes}
        kernel.reads |= {k: size for k, size in operator.reads.items() if k[0] not in made}
        kernel.writes |= operator.writes
        kernel.last = sum(operator.writes.values())
    return kernels


def _at_most(sizes: _Sizes, size: int) -> _Sizes:
    return {key: min(each, size) for key, each in sizes.items()}


class _OneKernel(torch.autograd.Function):
    """RMSNorm as one kernel, and its backward as another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, recorder: KernelRecorder) -> Tensor:
        ctx.save_for_backward(x, *(() if weight is None else (weight,)))
        ctx.recorder = recorder
        y = torch.empty_like(x)
        recorder.record([x], [y])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        dx, sums = torch.empty_like(x), [torch.empty_like(weight) for weight in weights]
        ctx.recorder.record([x, *gradients], [dx, *sums])
        return dx, (sums[0] if sums else None), None


@contextmanager
def norm_in_one_kernel(recorder: KernelRecorder) -> Iterator[None]:
    """Replace `F.rms_norm`, which the CPU has not as one kernel but GPUs have."""

    def fused(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if isinstance(x, DTensor) or isinstance(weight, DTensor):
            return original(x, shape, weight, eps)
        return _OneKernel.apply(x, weight, recorder)

    original = F.rms_norm
    with rms_norm_by(fused):
        yield
