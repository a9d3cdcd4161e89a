# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A recording turned into a straight program: what backward runs again, without Python's detours.

The first forward pass of a block is recorded operator by operator, see `replay`. Later passes with
equal shapes save the same tensors in the same order. So they need no recording: the program knows
by its number which saved tensor is kept and which is made again, and backward runs the operators
that matter, one after the other, below autograd and DTensor.

There is no program, and every pass is recorded, where a repeated operator is a collective or draws
random numbers, and where an operator reads a tensor that is neither an argument, a parameter, a
buffer nor a result of this block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from torchtitan_lr.compat.dispatch import (
    ATTENTION_OPERATORS,
    schema_of,
    tree_leaves,
    tree_map,
)
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.models.marks import listen
from torchtitan_lr.parallel.recompute.tape import Call, Output, Saved, alias, lies_at, recomputing


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in the arguments of a recorded operator."""

    index: int


UNKNOWN = object()
"""Stands for a tensor that is neither from outside nor a result."""


class Outside:
    """What a block reads and does not make: its arguments, parameters and buffers.

    Args:
        block: The module.
    """

    def __init__(self, block: nn.Module) -> None:
        # FSDP replaces parameters between passes, so that they are looked up by name.
        self._names = [
            (module, name)
            for module in block.modules()
            for named in (module.named_parameters, module.named_buffers)
            for name, _ in named(recurse=False)
        ]

    def tensors(self, arguments: Any) -> Iterator[Tensor]:
        """Yield the tensors, always in the same order; of DTensors the local part."""
        for x in tree_leaves(arguments):
            if isinstance(x, Tensor):
                yield local_part(x)
        for module, name in self._names:
            yield local_part(getattr(module, name))


class Values:
    """Numbers the tensors of one forward pass: those from outside, then results.

    It holds every tensor, so that no id is given away twice, and lives as long as the pass.

    Args:
        outside: The tensors from outside, in order.
    """

    def __init__(self, outside: Iterator[Tensor]) -> None:
        self._tensors = list(outside)
        self.outside = len(self._tensors)
        self._slots: dict[int, Slot] = {}
        for index, x in enumerate(self._tensors):
            self._slots.setdefault(id(x), Slot(index))
        self.places: dict[int, Output] = {}
        """Where each result lies, by slot."""

    def add(self, x: Any, place: Any) -> Slot | None:
        """Return a result's slot, a new one unless it has one; None for what is no tensor."""
        if not isinstance(x, Tensor):
            return None
        if id(x) not in self._slots:
            slot = self._slots[id(x)] = Slot(len(self._tensors))
            self._tensors.append(x)
            if isinstance(place, Output):
                self.places[slot.index] = place
        return self._slots[id(x)]

    def add_alias(self, x: Tensor, source: Tensor) -> None:
        """Give a detached tensor the number of its source."""
        if id(source) in self._slots and id(x) not in self._slots:
            self._slots[id(x)] = self._slots[id(source)]
            self._tensors.append(x)

    def refer(self, arguments: Any) -> Any:
        """Return the arguments of an operator with slots for tensors."""
        return tree_map(self._refer, arguments)

    def _refer(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return self._slots.get(id(x), UNKNOWN)


@dataclass
class Program:
    """What a forward pass saves, and what backward repeats.

    Args:
        outside: What the block reads.
        saved: By number: None for a tensor from outside, otherwise what stands for it.
        marks: Storage of each marked tensor, in order; None where it is kept already.
        kept_here: Storage that is kept when the saved tensor of this number is made, for
            operators whose results are kept.
        views: Parts of kept storages that the operators read.
        repeat: Runs the operators. It takes the tensors from outside, then the views, and returns
            one tensor for each entry of ``made_again``.
        made_again: Number of each saved tensor that is made again, and where it lies on the storage
            of the tensor that ``repeat`` returns, unless it is that tensor.
    """

    outside: Outside
    saved: list[Saved | None]
    marks: list[int | None]
    kept_here: dict[int, int]
    views: list[Output]
    repeat: Callable[..., tuple[Tensor, ...]]
    made_again: list[tuple[int, Output | None]]

    def run(self, arguments: Any, kept: dict[int, Tensor]) -> dict[int, Tensor]:
        """Repeat the operators.

        Args:
            arguments: The block's arguments, positional and keyword.
            kept: The kept tensors by storage.

        Returns:
            The saved tensors that are not kept, by number.
        """
        views = [alias(kept[place.storage], place) for place in self.views]
        with torch.no_grad():
            made = self.repeat(*self.outside.tensors(arguments), *views)
        return {
            number: x if place is None else alias(x, place)
            for (number, place), x in zip(self.made_again, made, strict=True)
        }


def build_program(
    outside: Outside,
    values: Values,
    calls: list[Call],
    saved: list[Saved | None],
    marks: list[int | None],
    kept: set[int],
) -> Program | None:
    """Turn a recording into a program.

    Args:
        outside: What the block reads.
        values: The tensors of the forward pass.
        calls: The operators that backward repeats.
        saved: What autograd saved.
        marks: The storages of marked tensors.
        kept: All kept storages.

    Returns:
        The program, or None where there is none.
    """
    kept_here = {s.place.storage: s.index for s in reversed(saved) if s and s.place.storage in kept}
    by_number = {i: storage for storage, i in kept_here.items() if storage not in marks}
    if kept - set(marks) - set(by_number.values()):
        return None
    if not all(_is_repeatable(call) for call in calls):
        return None
    again = [s for s in saved if s and s.place.storage not in kept]
    views = _views_read(values, calls, kept)
    if views is None:
        return None
    graph, results = _graph(values, calls, views)
    if any(s.place.storage not in results for s in again):
        return None
    graph.output(tuple(results[s.place.storage][1] for s in again))
    graph.eliminate_dead_code()
    made_again = []
    for s in again:
        own = values.places.get(results[s.place.storage][0])
        made_again.append((s.index, None if own == s.place else s.place))
    repeat = torch.fx.GraphModule({}, graph).forward
    return Program(outside, saved, marks, by_number, [*views.values()], repeat, made_again)


def _views_read(values: Values, calls: list[Call], kept: set[int]) -> dict[int, Output] | None:
    """Return the parts of kept tensors that are read before they are made, by slot."""
    views: dict[int, Output] = {}
    made = set(range(values.outside))
    for call in calls:
        for slot in slots_of(call.arguments) - made - views.keys():
            place = values.places.get(slot)
            if place is None or place.storage not in kept:
                return None
            views[slot] = place
        made |= slots_of(call.slots)
    return views


def _graph(
    values: Values, calls: list[Call], views: dict[int, Output]
) -> tuple[torch.fx.Graph, dict[int, tuple[int, torch.fx.Node]]]:
    """Return the operators as a graph, and the last slot and node on each storage they write."""
    graph = torch.fx.Graph()
    nodes = {i: graph.placeholder(f"outside_{i}") for i in range(values.outside)}
    nodes |= {slot: graph.placeholder(f"kept_{slot}") for slot in views}
    results: dict[int, tuple[int, torch.fx.Node]] = {}
    for call in calls:
        args, kwargs = tree_map(lambda x: nodes[x.index] if type(x) is Slot else x, call.arguments)
        node = graph.call_function(call.func, args, kwargs)
        several = call.spec.num_children > 0
        for i, (slot, place) in enumerate(zip(call.slots, call.outputs, strict=True)):
            if slot is None:
                continue
            nodes[slot.index] = graph.call_function(getitem, (node, i)) if several else node
            if isinstance(place, Output):
                results[place.storage] = slot.index, nodes[slot.index]
    return graph, results


def slots_of(arguments: Any) -> set[int]:
    """Return the slots among arguments or results of operators."""
    return {x.index for x in tree_leaves(arguments) if type(x) is Slot}


def _is_repeatable(call: Call) -> bool:
    if UNKNOWN in tree_leaves(call.arguments):
        return False
    if call.func in ATTENTION_OPERATORS:  # random with dropout only
        names = schema_of(call.func)[1]
        given = dict(zip(names, call.arguments[0], strict=False)) | call.arguments[1]
        return not given.get("dropout_p")
    tags = call.func.tags
    return call.func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in tags


class Programs:
    """The programs of one block, by the form of its arguments.

    Args:
        block: The module.
    """

    def __init__(self, block: nn.Module) -> None:
        self.outside = Outside(block)
        self.found: dict[Any, Program | None] = {}

    def key(self, arguments: Any) -> Any:
        """Return what decides which operators run, None for arguments that cannot be compared."""
        form: list[Any] = []
        devices = set()
        for x in tree_leaves(arguments):
            if type(x) is Tensor:
                form.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
                devices.add(x.device.type)
            elif x is None or isinstance(x, bool | int | float | str):
                form.append(x)
            else:
                return None
        for device in filter(torch.amp.is_autocast_available, devices):
            form.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        cuda = torch.backends.cuda
        form += [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()]
        form += [cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
        return tuple(form)


class Unexpected(Exception):
    """A forward pass saved other tensors than the recorded one."""


class Pass:
    """A forward pass that follows a program.

    Args:
        function: The block.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        program: What it follows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        program: Program,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.program = program
        self.kept: dict[int, Tensor] = {}
        self._count = self._marks = 0
        self._made_again: dict[int, Tensor] = {}

    def forward(self) -> Any:
        """Run the block; tensors that autograd saves are kept only where they must be.

        Raises:
            Unexpected: It saved or marked other tensors than the program's.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, listen(self._keep):
            out = self.function(*self.args, **self.kwargs)
        if (self._count, self._marks) != (len(self.program.saved), len(self.program.marks)):
            raise Unexpected
        return out

    def _keep(self, x: Tensor) -> None:
        if self._marks == len(self.program.marks):
            raise Unexpected
        storage = self.program.marks[self._marks]
        self._marks += 1
        if storage is not None and storage not in self.kept:
            self.kept[storage] = x.detach()

    def _pack(self, x: Tensor) -> Any:
        number = self._count
        if number == len(self.program.saved):
            raise Unexpected
        self._count += 1
        saved = self.program.saved[number]
        if saved is None:
            return x.detach()
        place = saved.place
        if x.shape != place.size or x.dtype != place.dtype or x.stride() != place.stride:
            raise Unexpected
        storage = self.program.kept_here.get(number)
        if storage is not None:
            self.kept[storage] = x.detach()
        return saved

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept = self.kept.get(packed.place.storage)
        if kept is not None:
            return kept if lies_at(kept, packed.place) else alias(kept, packed.place)
        if packed.index not in self._made_again:
            with recomputing():
                self._made_again = self.program.run((self.args, self.kwargs), self.kept)
        return self._made_again.pop(packed.index)
