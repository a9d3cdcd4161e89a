# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Record a run on fake tensors: living storages, products, attention and element-wise kernels.

The recorder sees every operator below autograd, backward and recomputation included.
"""

import gc
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_lr.compat import dispatch
from torchtitan_lr.compat.fake import FakeTensor

_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_ATTENTION = tuple({str(op.overloadpacket).split(".")[-1] for op in dispatch.ATTENTION_OPERATORS})
# Operators, and the position of their first factor
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
_PICKS = ("gather", "embedding")  # operators that read of a table as much as they return


Product = tuple[float, float]  # FLOPs, and bytes of factors and result, each passed once
Heads = tuple[int, int]  # of fused attention: their width, and the keys of a query


@dataclass(frozen=True)
class Work:
    """Work of a device: of a block, of the ends of a model, or of an optimizer's step."""

    products: Mapping[Product, float] = field(default_factory=dict)  # numbers of matrix products
    # FLOPs of fused attention; the masked half of the scores is not computed
    attention: Mapping[Heads, float] = field(default_factory=dict)
    traffic: float = 0.0  # bytes that the other kernels read and write
    kernels: float = 0.0  # number of those and of attention's

    @property
    def flops(self) -> float:
        """FLOPs of matrix products."""
        return sum(flops * number for (flops, _), number in self.products.items())

    @property
    def launches(self) -> float:
        """Number of all kernels."""
        return self.kernels + sum(self.products.values())

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """Return this work and ``times`` the other."""
        products, attention = dict(self.products), dict(self.attention)
        for product, number in other.products.items():
            products[product] = products.get(product, 0.0) + times * number
        for heads, flops in other.attention.items():
            attention[heads] = attention.get(heads, 0.0) + times * flops
        traffic = self.traffic + times * other.traffic
        return Work(products, attention, traffic, self.kernels + times * other.kernels)


def product_work(batch: int, m: int, n: int, k: int, itemsize: int) -> Work:
    """Return the work of one kernel: ``batch`` products (m, k) by (k, n)."""
    sides = m * k + k * n + m * n
    return Work({(2 * batch * m * n * k, batch * sides * itemsize): 1})


@dataclass
class _Storage:
    reference: StorageWeakRef  # while it exists, no other storage gets the address
    size: int  # bytes that count as living
    number: int  # unlike an address, never used again


_Sizes = dict[tuple[int, int], int]  # bytes by number of the storage and offset


@dataclass
class _Kernel:
    """An operator, or several element-wise ones."""

    backward: bool
    reads: _Sizes = field(default_factory=dict)
    writes: _Sizes = field(default_factory=dict)
    heavy: Work | None = None  # of a product or of attention
    extern: bool = False  # whether no compiler fuses it: a heavy one or a collective
    last: int = 0  # bytes that the last of several operators writes


class Recorder(dispatch.TorchDispatchMode):
    """Tracks the storages that operators allocate; records operators, what they read and write."""

    def __init__(self, outside: Collection[int] = ()) -> None:
        super().__init__()
        self.backward = False  # set by the caller when backward begins
        self.peak = 0  # bytes
        self._outside = outside  # addresses of storages that do not count
        self._at_most = self._numbers = 0
        self._storages: dict[int, _Storage] = {}
        self._operators: list[_Kernel] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # unwrap first: this mode then gets the calls on local tensors
        out = func(*args, **(kwargs or {}))
        # DTensor infers shapes by operators on fake tensors, and by those that make them.
        if not (isinstance(out, FakeTensor) or any(issubclass(kind, FakeTensor) for kind in types)):
            self._observe(func, args, kwargs or {}, out)
        return out

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        # An operator on a list in place returns nothing.
        results = args[0] if out is None and "_foreach" in str(func) else out
        writes = self._sizes(results, allocated=True)
        if self._at_most > self.peak:  # otherwise a sweep cannot change the peak
            self._at_most = self._sweep()
            self.peak = max(self.peak, self._at_most)
        # A tensor into which an operator writes its result is no input.
        named = {name: value for name, value in kwargs.items() if name != "out"}
        inputs = (args[1:] if func is torch.ops.aten.copy_.default else args, named)
        namespace, _, name = str(func).rpartition(".")[0].rpartition(".")
        if not writes or name in _ALLOCATIONS:
            return
        if namespace not in ("aten", "prims") and "c10d" not in namespace:
            # A mark of checkpointing: an identity that a compiler removes.
            for new, old in zip(_tensors(out), _tensors(inputs), strict=False):
                old_number = self._known(old.untyped_storage()).number
                self._known(new.untyped_storage()).number = old_number
            return
        reads = self._sizes(inputs)
        known = {storage for storage, _ in reads}
        if not dispatch.changes_arguments(func) and all(storage in known for storage, _ in writes):
            return  # a view
        if name in _PICKS:
            reads = _at_most(reads, sum(writes.values()))
        elif name == "scatter_add_":  # changes as much of a table as it adds
            added = args[3]
            size = added.numel() * added.element_size()
            reads, writes = _at_most(reads, size), _at_most(writes, size)
        operator = _Kernel(self.backward, reads, writes)
        if name in _PRODUCTS:
            a, b = args[_PRODUCTS[name] :][:2]  # (..., m, k) and (..., k, n)
            sides = a.shape[-2], b.shape[-1], a.shape[-1]
            operator.heavy = product_work(prod(a.shape[:-2]), *sides, a.element_size())
        elif name.startswith(_ATTENTION):
            heads, flops = _attention("backward" in name, args)
            operator.heavy = Work(attention={heads: flops}, kernels=1)
        operator.extern = operator.heavy is not None or "c10d" in namespace
        self._operators.append(operator)

    def _known(self, storage: torch.UntypedStorage, allocated: bool = False) -> _Storage:
        address = dispatch.storage_address(storage)
        known = self._storages.get(address)
        if known is None or known.reference.expired():
            size = storage.nbytes() if allocated and address not in self._outside else 0
            self._numbers += 1
            known = _Storage(StorageWeakRef(storage), size, self._numbers)
            self._storages[address] = known
            self._at_most += size
        return known

    def bytes(self) -> int:
        """Return the bytes of the live storages."""
        gc.collect()
        return self._sweep()

    def _sweep(self) -> int:
        gone = [a for a, storage in self._storages.items() if storage.reference.expired()]
        for address in gone:
            del self._storages[address]
        return sum(storage.size for storage in self._storages.values())

    def record(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record a kernel that no operator of this machine stands for."""
        self._operators.append(_Kernel(self.backward, self._sizes(reads), self._sizes(writes)))

    def rms_norm(self, x: Tensor, shape: Any, weight: Tensor, eps: float) -> Any:
        """Take `F.rms_norm`'s place: one kernel, which GPUs have."""
        return _OneKernel.apply(x, weight, self)

    def _sizes(self, tree: Any, allocated: bool = False) -> _Sizes:
        sizes: _Sizes = {}
        for x in _tensors(tree):
            storage = x.untyped_storage()
            whole = min(x.numel() * x.element_size(), storage.nbytes())
            key = self._known(storage, allocated).number, int(x.storage_offset())
            sizes[key] = max(sizes.get(key, 0), whole)
        return sizes

    def work(self, backward: bool, fused: bool) -> Work:
        """Return the work of a pass."""
        work = self._fused(backward) if fused else Work()
        for operator in self._operators:
            if operator.backward != backward:
                continue
            if operator.heavy is not None:
                work = work.plus(operator.heavy)
            elif not operator.extern and not fused:
                moved = sum(operator.reads.values()) + sum(operator.writes.values())
                work = work.plus(Work(traffic=moved, kernels=1))
        return work

    def _fused(self, backward: bool) -> Work:
        """Return the work where each run of element-wise operators is one kernel.

        A kernel writes what a product or a collective reads. What only other kernels read, they
        compute again from the inputs of its maker, as the partitioner of a compiler does.
        """
        kernels = _runs(self._operators)
        needed: set[int] = set()  # what products and collectives read
        for operator in self._operators:
            if operator.extern:
                needed.update(number for number, _ in operator.reads)
        makers: dict[int, _Kernel] = {}  # which kernel writes a result
        for kernel in kernels:
            makers |= {number: kernel for number, _ in kernel.writes}
        work = Work()
        for kernel in kernels:
            if kernel.backward != backward:
                continue
            reads: _Sizes = {}
            for key, size in kernel.reads.items():
                maker = makers.get(key[0], kernel)
                if maker is kernel or key[0] in needed:
                    reads[key] = size
                else:
                    reads.update(maker.reads)
            kept = sum(size for key, size in kernel.writes.items() if key[0] in needed)
            largest = max(kernel.writes.values(), default=0)
            moved = sum(reads.values()) + (kept or min(largest, kernel.last))
            work = work.plus(Work(traffic=moved, kernels=1))
        return work


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in dispatch.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _attention(backward: bool, args: Any) -> tuple[Heads, float]:
    """Return heads and FLOPs of fused attention, whose arguments have factors (b, h, s, e)."""
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    # Two products forward, five backward, which computes the scores again: each below the
    # diagonal. With fewer queries it ends in the lower right.
    each = float(query.numel() * (2 * key.shape[-2] - query.shape[-2]))
    return (query.shape[-1], key.shape[-2]), (5 if backward else 2) * each


def _runs(operators: list[_Kernel]) -> list[_Kernel]:
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
        made = {number for number, _ in kernel.writes}
        kernel.reads |= {key: n for key, n in operator.reads.items() if key[0] not in made}
        kernel.writes |= operator.writes
        kernel.last = sum(operator.writes.values())
    return kernels


def _at_most(sizes: _Sizes, size: int) -> _Sizes:
    return {key: min(each, size) for key, each in sizes.items()}


class _OneKernel(torch.autograd.Function):
    """RMSNorm as one kernel, which keeps its input and the statistic; backward is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recorder: Recorder) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=wide))
        ctx.recorder = recorder
        y = torch.empty_like(x)
        recorder.record([x], [y])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        ctx.recorder.record([x, *gradients], [dx, dw])
        return dx, dw, None
