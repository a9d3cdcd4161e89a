# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What operators are given and return, allocate, and read of a device."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Noted(TorchDispatchMode):
    """Calls a function with each operator, its arguments and its result."""

    def __init__(self, note: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, result)
        return result


class ProductsInOrder(TorchDispatchMode):
    """Adds up the terms of every matrix product one after the other, and rounds SiLU once.

    A CPU chooses the order of a product's terms by their number, so that terms of 0 change its
    rounding, and computes the exponentials of a row's last entries in another way.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("silu", "silu_backward"):
            return func(*(x.double() for x in args)).to(args[0].dtype)
        if name not in ("mm", "bmm", "addmm"):
            return func(*args, **kwargs)
        *start, a, b = args
        total = start[0].clone() if start else a.new_zeros(*a.shape[:-1], b.shape[-1])
        for column, row in zip(a.split(1, -1), b.split(1, -2), strict=True):
            total += column * row
        return kwargs["out"].copy_(total) if "out" in kwargs else total


class Allocations(TorchDispatchMode):
    """Knows every storage that operators made, and which of them are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                size = storage.nbytes()
                self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), size))
        return out

    def bytes_alive(self, outside: set[int]) -> int:
        gc.collect()
        alive = [(k, size) for k, (ref, size) in self.storages.items() if not ref.expired()]
        return sum(size for key, size in alive if key not in outside)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return a function's peak on the CPU by torch's allocator, with the copies inside a kernel."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    living = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            living += event.nbytes()
            peak = max(peak, living)
    return peak


def reads(call: Callable[[], Any]) -> int:
    """How often the host reads a number of the device, below every operator too."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return sum(event.name == "aten::_local_scalar_dense" for event in found.events())
