# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The matrix products that a rank issues between the start of a collective and its wait.

Without any the device waits for it. A functional collective has an operator that waits, a ``c10d``
one ends where an operator reads its result, FSDP2's reduce-scatter where the next one starts or
backward ends. What runs behind that on FSDP2's streams is no read: a cast of its result, which then
is the result, or the end of an exchange of compressed gradients.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_lr.compat import dispatch
from torchtitan_lr.compat.process_groups import functional


class _Running(NamedTuple):
    """A started ``c10d`` collective, the FLOPs issued before it, and the bytes that it writes."""

    key: Hashable
    before: int
    storage: StorageWeakRef  # while it exists, no other storage gets the address
    begin: int
    end: int


@dataclass
class Overlap:
    """Counts the FLOPs of products between start and wait of collectives."""

    flops: Counter[Hashable] = field(default_factory=Counter)
    _issued: int = 0
    _running: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    _unread: dict[int, list[_Running]] = field(default_factory=dict)

    def start(self, key: Hashable, result: Any, written: Sequence[Tensor] = ()) -> None:
        """Record the start of a collective."""
        if isinstance(result, Tensor):
            self._running[dispatch.storage_address(result)] = (key, self._issued)
        elif written:
            # Several tensors arrive together: the first to be read ends the collective.
            first = written[0]
            storage = StorageWeakRef(first.untyped_storage())
            found = _Running(key, self._issued, storage, *_span(first))
            self._unread.setdefault(dispatch.storage_address(first), []).append(found)

    def observe(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, reducing: bool = False
    ) -> None:
        """Record an operator that is no collective; ``reducing`` is what FSDP2 runs behind one."""
        packet = getattr(func, "overloadpacket", None)
        if packet is functional.wait_tensor:
            if (found := self._running.pop(dispatch.storage_address(args[0]), None)) is not None:
                key, issued_before = found
                self.flops[key] += self._issued - issued_before
            return
        if self._unread and not reducing:
            self._read(func, (args, kwargs), result)
        elif self._unread and packet is dispatch.CAST:
            self._follow(args[0], result)
        self._issued += dispatch.product_flops(packet, args, kwargs, result)

    def _follow(self, cast: Tensor, result: Tensor) -> None:
        """Let the collectives that a cast reads end where its result is read."""
        begin, end = _span(result)
        for running in self._unread.pop(dispatch.storage_address(cast), []):
            storage = StorageWeakRef(result.untyped_storage())
            moved = running._replace(storage=storage, begin=begin, end=end)
            self._unread.setdefault(dispatch.storage_address(result), []).append(moved)

    def _read(self, func: Any, arguments: Any, result: Any) -> None:
        """End the ``c10d`` collectives of which an operator reads a result."""
        inputs = [x for x in dispatch.tree_leaves(arguments) if isinstance(x, Tensor)]
        read = {dispatch.storage_address(x) for x in inputs}
        if not read & self._unread.keys():
            return
        made = {
            dispatch.storage_address(x)
            for x in dispatch.tree_leaves(result)
            if isinstance(x, Tensor)
        }
        is_view = made and made <= read and not dispatch.changes_arguments(func)
        if is_view:  # it reads nothing
            return
        for x in inputs:
            self.end(partial(_overlaps, _span(x)), dispatch.storage_address(x))

    def end(self, ends: Callable[[Any], bool], at: int | None = None) -> None:
        """End the ``c10d`` collectives that something waits for here."""
        for address in list(self._unread) if at is None else [at]:
            kept = []
            for running in self._unread.pop(address, []):
                if running.storage.expired():  # nothing has visibly waited for it
                    continue
                if ends(running):
                    self.flops[running.key] += self._issued - running.before
                else:
                    kept.append(running)
            if kept:
                self._unread[address] = kept


def _overlaps(span: tuple[int, int], running: _Running) -> bool:
    """Return whether a collective writes into some bytes of its storage."""
    begin, end = span
    return running.begin < end and begin < running.end


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    begin = int(x.storage_offset())
    length = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return begin * x.element_size(), (begin + length * (x.numel() > 0)) * x.element_size()
