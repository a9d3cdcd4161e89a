# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ledger of collectives: measured calls by part of the model, pass, operation and mesh.

A dispatch mode intercepts every collective below autograd: those of tensor parallelism, of compiled
code, and the ``c10d`` calls of FSDP2, the optimizer and the trainer. The model and the plans
contain no code for it. Elements are those of the logical tensor, once per call: the input of an
all-reduce or reduce-scatter, the output of an all-gather. Bytes are of one rank, not wire volume.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from torchtitan_lr.compat import dispatch, process_groups
from torchtitan_lr.compat.dispatch import TorchDispatchMode, schema_of, tree_leaves
from torchtitan_lr.ledger.scopes import STEP, ScopeTracker
from torchtitan_lr.parallel.stages import boundary_of

COMBINED_DIMS = ("batch", "loss")
"""torchtitan's names for combined dimensions, which may share the group of a single dimension."""

COUNTS = ("calls", "elements", "bytes", "overlapped_flops")  # the numbers in a row of the ledger

_WRAPPERS = (DTensor, process_groups.AsyncCollectiveTensor)


class Entry(NamedTuple):
    """The key of a counter."""

    scope: str
    pass_: str
    op: str
    mesh_dim: str
    dtype: torch.dtype
    recompute: bool


class CommLedger(TorchDispatchMode):
    """Counts this rank's collectives inside a ``with`` block, except those of groups of one rank.

    Entering again continues the counts; `clear` resets them. Compiled blocks are counted as they
    run: entering the block neither recompiles them nor makes them run eagerly. `groups` are process
    groups by the name of their mesh dimension. If two names share a group, the first one counts,
    but a combined dimension's last; ``cp`` counts for what blocks send, if it shares the group of
    ``fsdp``. The group of all ranks is ``world`` if no dimension has it. All collectives of
    `step_dims` belong to the optimizer, also those that it starts during backward.
    """

    supports_higher_order_operators = True  # compiled code uses one to recompute random operators
    # Compiled code stays compiled; its collectives pass through the dispatcher too.
    ignore_compile_internals = classmethod(lambda cls: True)

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        groups: Mapping[str, dist.ProcessGroup],
        step_dims: Collection[str] = (),
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        super().__init__()
        self._model_parts, self._step_dims = model_parts, frozenset(step_dims)
        self._optimizers = optimizers
        self._mesh_dims: dict[str, str] = {}
        names = sorted(groups, key=lambda name: name in COMBINED_DIMS)
        named = [(name, groups[name]) for name in names]
        if dist.is_initialized() and dist.group.WORLD is not None:
            named.append(("world", dist.group.WORLD))
        for name, group in named:
            self._mesh_dims.setdefault(group.group_name, name)
        self._context = groups["cp"].group_name if "cp" in groups else None
        self._calls: Counter[Entry] = Counter()
        self._elements: Counter[Entry] = Counter()
        self._overlap = _Overlap()

    def __enter__(self) -> "CommLedger":
        self._tracker = ScopeTracker(self._model_parts, self._optimizers)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._tracker.hooks.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # unwrap first: this mode then gets the calls on local tensors
        kwargs = kwargs or {}
        call = identify(func, args, kwargs)
        if call is None or process_groups.group_size(call.group) <= 1:
            result = func(*args, **kwargs)
            self._overlap.observe(func, args, kwargs, result, self._tracker.reducing)
            return result
        entry = self._entry(call, args)
        self._calls[entry] += 1
        self._elements[entry] += call.elements
        result = func(*args, **kwargs)
        self._overlap.start(entry, result, call.results)
        return result

    def _entry(self, call: "Collective", args: tuple[Any, ...]) -> Entry:
        """Return the counter of a call that is about to run."""
        # Only for these: a received gradient keeps its mark when other collectives use it.
        message = boundary_of(args) if call.op in ("send", "recv") else None
        scope, pass_, recompute = (*message, False) if message else self._tracker.here()
        mesh_dim = self._mesh_dims.get(call.group, call.group)
        # Where FSDP2 shards over the context-parallel ranks alone, both have one group.
        in_block = scope.startswith("block") and not self._tracker.in_unit
        if call.group == self._context and in_block:
            mesh_dim = "cp"
        if mesh_dim in self._step_dims:
            scope, pass_, recompute = STEP, "optimizer", False
        return Entry(scope, pass_, call.op, mesh_dim, call.dtype, recompute)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Count what is sent in a ``with`` block, outside of the model, in a scope of its own."""
        self._tracker.outside = name
        yield
        self._tracker.outside = STEP

    def clear(self) -> None:
        """Reset all counts."""
        self._calls.clear()
        self._elements.clear()
        self._overlap = _Overlap()

    def rows(self, split_recompute: bool = False) -> list[dict[str, Any]]:
        """Return the counts.

        Keys are ``scope`` (``block 0`` ..., between pipeline stages ``boundary 0`` ...,
        ``embedding``, ``head``, ``loss``, ``optimizer``, ``outer``, ``step``), ``pass``
        (``forward``, ``backward``, ``optimizer``), ``op``, ``mesh_dim``, ``dtype``, ``calls``,
        ``elements``, ``bytes`` and ``overlapped_flops``: the FLOPs of products that this rank
        issues between start and wait (`Overlap`). With `split_recompute`, collectives that
        activation checkpointing recomputes have rows of their own with a key ``recompute``;
        recomputation inside a compiled backward cannot be detected.
        """
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for entry, calls in self._calls.items():
            names = entry._asdict() | {"dtype": str(entry.dtype).removeprefix("torch.")}
            names = {name.rstrip("_"): value for name, value in names.items()}
            if not split_recompute:
                del names["recompute"]
            row = merged.setdefault(tuple(names.values()), names | dict.fromkeys(COUNTS, 0))
            row["calls"] += calls
            row["elements"] += self._elements[entry]
            row["bytes"] += self._elements[entry] * entry.dtype.itemsize
            row["overlapped_flops"] += self._overlap.flops[entry]
        return sorted(merged.values(), key=reading_order)


def reading_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the place of a row: its position in the model, then its pass and operation."""
    scopes = ("embedding", "block", "boundary", "head", "loss", "optimizer", "outer", "step")
    passes = ("forward", "backward", "optimizer")
    name, _, index = row["scope"].partition(" ")
    rest = (row["op"], row["mesh_dim"], row["dtype"], row.get("recompute", False))
    return (scopes.index(name), int(index or 0), passes.index(row["pass"]), *rest)


class Collective(NamedTuple):
    """One call of a collective."""

    op: str  # the operation's common name
    group: str  # name of the process group
    dtype: torch.dtype  # dtype of the payload
    elements: int  # elements of the logical tensor, the larger of the call's input and output
    # Tensors that a ``c10d`` operator writes; empty if it only sends
    results: tuple[Tensor, ...] = ()


def identify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective | None:
    """Identify the collective of a dispatched operator; an unknown one is a NotImplementedError."""
    if getattr(func, "namespace", None) not in process_groups.NAMESPACES:
        return None
    name, parameters = schema_of(func)
    if name in process_groups.NO_PAYLOAD or process_groups.GROUP_ARGUMENTS.isdisjoint(parameters):
        return None
    if name not in process_groups.OPERATIONS:
        raise NotImplementedError(f"the ledger does not know the collective {func}")
    op = process_groups.OPERATIONS[name]
    named = dict(zip(parameters, args, strict=False)) | kwargs
    payload: list[Tensor] = []  # of the first argument that has tensors
    results: list[Tensor] = []
    has_results = False
    elements = 0
    for key, value in named.items():
        tensors = _tensors(value)
        payload = payload or tensors
        elements = max(elements, sum(x.numel() for x in tensors))
        if key.startswith("out"):
            has_results = True
            results += tensors
    group = named.get("group_name", named.get("process_group"))
    if op == "all_gather" and not has_results:
        # A functional all-gather has only its input as an argument.
        elements *= named["group_size"]
    if not has_results and op not in ("send", "send_recv"):
        results = payload  # in place
    return Collective(
        op, process_groups.group_name_of(group), payload[0].dtype, elements, tuple(results)
    )


class _Running(NamedTuple):
    """A started collective, and what it writes."""

    entry: Entry
    before: int  # FLOPs issued before it
    has_wait: bool  # whether an operator waits for it, as for a functional collective
    storage: StorageWeakRef  # while it exists, no other storage gets the address
    address: int
    begin: int  # first byte in the storage
    end: int  # byte behind the last

    @classmethod
    def of(cls, entry: Entry, before: int, has_wait: bool, x: Tensor) -> "_Running":
        """Return a collective that writes a tensor."""
        storage = x.untyped_storage()
        place = StorageWeakRef(storage), dispatch.storage_address(storage), *_span(x)
        return cls(entry, before, has_wait, *place)

    def is_read(self, x: Tensor) -> bool:
        """Return whether a tensor has bytes of the result."""
        if dispatch.storage_address(x) != self.address:
            return False
        begin, end = _span(x)
        return self.begin < end and begin < self.end


@dataclass
class _Overlap:
    """Counts the FLOPs of products that a rank issues between start and wait of collectives.

    Without any the device waits. A functional collective has an operator that waits, a ``c10d`` one
    ends where an operator reads its result, FSDP2's reduce-scatter where the next one starts or
    backward ends. What runs behind that on FSDP2's streams is no read: a cast of its result, which
    then is the result, or the end of an exchange of compressed gradients.
    """

    flops: Counter[Entry] = field(default_factory=Counter)
    _issued: int = 0
    _running: list[_Running] = field(default_factory=list)

    def start(self, entry: Entry, result: Any, written: Sequence[Tensor]) -> None:
        """Record the start of a collective."""
        # FSDP2 waits for a unit's reduce-scatter before the next one, and for all at the end of
        # backward.
        next_unit = entry.op == "reduce_scatter"
        for running in self._unread():
            same = running.entry.op == entry.op and running.entry.mesh_dim == entry.mesh_dim
            waits = entry.pass_ == "forward" or (next_unit and same)
            if running.entry.pass_ == "backward" and waits:
                self._end(running)
        has_wait = isinstance(result, Tensor)
        # Several tensors arrive together: the first to be read ends the collective.
        results = [result] if has_wait else written
        if results:
            self._running.append(_Running.of(entry, self._issued, has_wait, results[0]))

    def observe(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, reducing: bool
    ) -> None:
        """Record an operator that is no collective; ``reducing`` is what FSDP2 runs behind one."""
        packet = getattr(func, "overloadpacket", None)
        if packet is process_groups.functional.wait_tensor:
            address = dispatch.storage_address(args[0])
            for running in self._running.copy():
                if running.has_wait and running.address == address:
                    self._end(running)
            return
        unread = self._unread()
        if unread and not reducing:
            inputs, outputs = _tensors((args, kwargs)), _tensors(result)
            made = {dispatch.storage_address(x) for x in outputs}
            read = {dispatch.storage_address(x) for x in inputs}
            # A view reads nothing.
            if not made or not made <= read or dispatch.changes_arguments(func):
                for running in unread:
                    if any(map(running.is_read, inputs)):
                        self._end(running)
        elif unread and packet is dispatch.CAST:
            address = dispatch.storage_address(args[0])
            for i, running in enumerate(self._running):
                if running.address == address:
                    self._running[i] = _Running.of(running.entry, running.before, False, result)
        self._issued += dispatch.product_flops(packet, args, kwargs, result)

    def _unread(self) -> list[_Running]:
        """Return the ``c10d`` collectives that nothing has waited for."""
        self._running = [each for each in self._running if not each.storage.expired()]
        return [running for running in self._running if not running.has_wait]

    def _end(self, running: _Running) -> None:
        self._running.remove(running)
        self.flops[running.entry] += self._issued - running.before


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    begin = int(x.storage_offset())
    length = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return begin * x.element_size(), (begin + length * (x.numel() > 0)) * x.element_size()
