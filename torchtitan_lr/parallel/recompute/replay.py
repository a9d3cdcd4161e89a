# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Recomputation of exactly what backward needs: nothing that only leads to a kept tensor.

``torch.utils.checkpoint`` repeats a function's operators one after the other. With a
down-projection in the middle of a block that is wasteful: its result is kept, yet the product, and
under tensor parallelism the all-reduce behind it, would run again only to be thrown away. Here the
forward pass is recorded as a list of operators and of the storages they read and write. When
backward asks for the first saved tensor, a walk from the saved tensors back to the kept ones finds
the operators that matter; the function runs again, and every other operator is answered with an
empty tensor.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_lr.compat.dispatch import (
    TorchDispatchMode,
    changes_arguments,
    storage_address,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torchtitan_lr.compat.fake import FakeTensor
from torchtitan_lr.models.marks import listen
from torchtitan_lr.parallel.recompute.tape import (
    OUTSIDE,
    Call,
    Output,
    Saved,
    alias,
    place_of,
    places,
    recomputing,
    shares_storage,
)

_IGNORED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})
"""Autograd's own and fake tensors' own, whose number differs between the two runs."""


class Recording:
    """The forward pass of one function call, and its repetition.

    Args:
        function: Run forward once and, in part, backward once.
        args: Its positional arguments; tensors among them are kept.
        kwargs: Its keyword arguments.
        kept_operators: Operators whose results are kept, besides the marked tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept_operators: frozenset[Any] = frozenset(),
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.kept_operators = kept_operators
        self.calls: list[Call] = []
        self.kept: dict[int, Tensor] = {}
        self._ids: dict[int, int] = {}
        # A weak reference keeps a storage's address from being given to another storage.
        self._references: list[StorageWeakRef] = []
        self._saved: list[Saved | None] = []
        self._recomputed: dict[int, Tensor] = {}
        self._autocast = _autocast_of(args)

    def forward(self) -> Any:
        """Run the function; tensors that autograd saves are kept only where they must be."""
        with (
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
            listen(self.keep),
            _Recorder(self),
        ):
            out = self.function(*self.args, **self.kwargs)
        # Nothing of the forward pass will be looked up by address again.
        self._ids.clear()
        self._references.clear()
        return out

    def keep(self, x: Tensor) -> None:
        """Keep the storage of a tensor made in this forward pass."""
        storage = self._find(x)
        if storage is not None:
            self.kept.setdefault(storage, x.detach())

    def record(self, func: Any, arguments: Any, result: Any) -> None:
        """Note an operator that has just run."""
        inputs = tree_leaves(arguments)
        reads = [self._find(x) for x in inputs if isinstance(x, Tensor)]
        leaves, spec = tree_flatten(result)
        outputs = [
            self._place(leaf, inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        call = Call(func, tuple(i for i in reads if i is not None), outputs, spec)
        if changes_arguments(func) and any(o.storage in self.kept for o in places(outputs)):
            raise RuntimeError(f"{func} changes a tensor that low-rank checkpointing keeps")
        self.calls.append(call)
        if func in self.kept_operators:
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    self.keep(leaf)

    def live_calls(self) -> list[bool]:
        """Return, operator by operator, whether backward needs its result made again."""
        needed = {s.place.storage for s in self._saved if s} - self.kept.keys()
        live = [False] * len(self.calls)
        for i in reversed(range(len(self.calls))):
            if OUTSIDE in self.calls[i].outputs:
                live[i] = True
            elif not needed.isdisjoint(self.calls[i].storages()):
                live[i] = True
                needed.update(s for s in self.calls[i].reads if s not in self.kept)
        return live

    def _pack(self, x: Tensor) -> Any:
        storage = self._find(x)
        if storage is None:  # an argument, a parameter, a buffer
            self._saved.append(None)
            return x.detach()
        saved = Saved(len(self._saved), place_of(x, storage, None))
        self._saved.append(saved)
        return saved

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.place.storage in self.kept:
            return alias(self.kept[packed.place.storage], packed.place)
        if packed.index not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(packed.index)

    def _recompute(self) -> None:
        with torch.enable_grad():
            args, kwargs = tree_map(_cut_loose, (self.args, self.kwargs))
        count = 0

        def collect(x: Tensor) -> None:
            nonlocal count
            saved = self._saved[count]
            if saved is not None and saved.place.storage not in self.kept:
                self._recomputed[count] = x.detach()
            count += 1

        with ExitStack() as stack:
            stack.enter_context(recomputing())
            stack.enter_context(torch.enable_grad())
            for autocast in self._autocast:
                stack.enter_context(autocast())
            hooks = torch.autograd.graph.saved_tensors_hooks(collect, _never)
            stack.enter_context(hooks)
            stack.enter_context(listen(_ignore))
            stack.enter_context(_Replayer(self))
            self.function(*args, **kwargs)

    def _find(self, x: Tensor) -> int | None:
        if type(x) not in (Tensor, torch.nn.Parameter, FakeTensor):  # no wrapper, such as DTensor
            return None
        return self._ids.get(storage_address(x))

    def _place(self, x: Tensor, inputs: list[Any]) -> Any:
        argument = next((i for i, value in enumerate(inputs) if value is x), None)
        address = storage_address(x)
        if address not in self._ids:
            if any(isinstance(i, Tensor) and shares_storage(i, x) for i in inputs):
                return OUTSIDE  # a view of something that stays
            self._ids[address] = len(self._references)
            self._references.append(StorageWeakRef(x.untyped_storage()))
        return place_of(x, self._ids[address], argument)


class _Recorder(TorchDispatchMode):
    """Notes every operator."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it first: only local tensors matter here
        result = func(*args, **(kwargs or {}))
        if func not in _IGNORED:
            self.recording.record(func, (args, kwargs or {}), result)
        return result


class _Replayer(TorchDispatchMode):
    """Runs the operators that matter; answers the others from what is kept, or with nothing."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.live = recording.live_calls()
        self.next = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func in _IGNORED:
            return func(*args, **(kwargs or {}))
        calls = self.recording.calls
        call = calls[self.next] if self.next < len(calls) else None
        if call is None or call.func is not func:
            raise RuntimeError(
                f"low-rank checkpointing: recomputation ran {func} where the forward pass ran "
                f"{call and call.func}; was it under a context, such as sdpa_kernel, that ended?"
            )
        live = self.live[self.next]
        self.next += 1
        if live:
            return func(*args, **(kwargs or {}))
        inputs = tree_leaves((args, kwargs))
        answers = [self._answer(out, inputs) for out in call.outputs]
        return tree_unflatten(answers, call.spec)

    def _answer(self, out: Any, inputs: list[Any]) -> Any:
        if not isinstance(out, Output):
            return out
        if out.argument is not None:
            return inputs[out.argument]
        if out.storage in self.recording.kept:
            return alias(self.recording.kept[out.storage], out)
        return torch.empty_strided(out.size, out.stride, dtype=out.dtype, device=out.device)


def _cut_loose(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    leaf = x.detach().requires_grad_()
    # Module hooks (the FLOP counter's) run other operators on leaves than on results.
    return leaf if x.is_leaf else leaf.view_as(leaf)


def _never(packed: Any) -> Tensor:
    raise RuntimeError("the graph of a recomputation is never run backward")


def _ignore(x: Tensor) -> None:
    """Ignore a mark: the forward pass has recorded it."""


def _autocast_of(args: tuple[Any, ...]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return makers of the autocast contexts in force, which end before backward runs."""
    devices = {"cpu"} | {x.device.type for x in args if isinstance(x, Tensor)}
    return [
        partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
        )
        for device in sorted(devices)
        if torch.amp.is_autocast_available(device)
    ]
