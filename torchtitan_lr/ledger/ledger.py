# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ledger of collectives: measured calls by part of the model, pass, operation and mesh.

A dispatch mode intercepts every collective below autograd: those of tensor parallelism, of compiled
code, and the ``c10d`` calls of FSDP2, the optimizer and the trainer. The model and the plans
contain no code for it. Elements are those of the logical tensor, once per call: the input of an
all-reduce or reduce-scatter, the output of an all-gather. Bytes are of one rank, not wire volume.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_lr.compat import process_groups
from torchtitan_lr.compat.dispatch import TorchDispatchMode, schema_of, tree_leaves
from torchtitan_lr.ledger.products import Overlap
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
        self._overlap = Overlap()

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
        # FSDP2 waits for a unit's reduce-scatter before the next one, and for all at the end of
        # backward.
        next_unit = (entry.op, entry.mesh_dim) if entry.op == "reduce_scatter" else None
        self._overlap.end(
            lambda run: (
                run.key.pass_ == "backward"
                and (entry.pass_ == "forward" or (run.key.op, run.key.mesh_dim) == next_unit)
            )
        )
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

    def clear(self) -> None:
        """Reset all counts."""
        self._calls.clear()
        self._elements.clear()
        self._overlap = Overlap()

    def rows(self, split_recompute: bool = False) -> list[dict[str, Any]]:
        """Return the counts.

        Keys are ``scope`` (``block 0`` ..., between pipeline stages ``boundary 0`` ...,
        ``embedding``, ``head``, ``loss``, ``optimizer``, ``step``), ``pass`` (``forward``,
        ``backward``, ``optimizer``), ``op``, ``mesh_dim``, ``dtype``, ``calls``, ``elements``,
        ``bytes`` and ``overlapped_flops``: the FLOPs of products that this rank issues between
        start and wait (`Overlap`). With `split_recompute`, collectives that activation
        checkpointing recomputes have rows of their own with a key ``recompute``; recomputation
        inside a compiled backward cannot be detected.
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
    scopes = ("embedding", "block", "boundary", "head", "loss", "optimizer", "step")
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
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
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
