# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ledger of collectives: measured calls by part of the model, pass, operation and mesh.

A dispatch mode intercepts every collective below autograd: those of tensor parallelism, of compiled
code, and the ``c10d`` calls of FSDP2, the optimizer and the trainer. The model and the plans
contain no code for it. Elements are those of the logical tensor, once per call: the input of an
all-reduce or reduce-scatter, the output of an all-gather. Bytes are of one rank, not wire volume.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_lr.compat import autograd, process_groups
from torchtitan_lr.compat.dispatch import TorchDispatchMode, schema_of, tree_leaves
from torchtitan_lr.compat.fsdp import wrap_unit_calls
from torchtitan_lr.parallel.stages import boundary_of

STEP = "step"  # scope of all calls outside the model and its loss: clipping, TSR-Adam, logging
OUTER = "outer"  # scope of the exchanges of replicas that train apart
OPTIMIZER = "optimizer"  # scope of the calls in the step of an optimizer that the ledger was given

LOSS = "loss"
"""Scope of the calls between the end of the model's forward and the start of its backward."""

COMBINED_DIMS = ("batch", "loss")
"""torchtitan's names for combined dimensions, which may share the group of a single dimension."""

COUNTS = ("calls", "elements", "bytes")  # the numbers in a row of the ledger

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
            return func(*args, **kwargs)
        entry = self._entry(call, args)
        self._calls[entry] += 1
        self._elements[entry] += call.elements
        return func(*args, **kwargs)

    def _entry(self, call: "Collective", args: tuple[Any, ...]) -> Entry:
        """Return the counter of a call that is about to run."""
        # Only for these: a received gradient keeps its mark when other collectives use it.
        message = boundary_of(args) if call.op in ("send", "recv") else None
        scope, pass_, recompute = (*message, False) if message else self._tracker.here()
        mesh_dim = self._mesh_dims.get(call.group, call.group)
        # Where FSDP2 shards over the context-parallel ranks alone, both have one group.
        in_block = scope.startswith("block") and not self._tracker.owner
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
        self._tracker.outside = None

    def clear(self) -> None:
        """Reset all counts."""
        self._calls.clear()
        self._elements.clear()

    def rows(self, split_recompute: bool = False) -> list[dict[str, Any]]:
        """Return the counts.

        Keys are ``scope`` (``block 0`` ..., between pipeline stages ``boundary 0`` ...,
        ``embedding``, ``head``, ``loss``, ``optimizer``, ``outer``, ``step``), ``pass``
        (``forward``, ``backward``, ``optimizer``), ``op``, ``mesh_dim``, ``dtype`` and `COUNTS`.
        With `split_recompute`, collectives that activation checkpointing recomputes have rows of
        their own with a key ``recompute``; recomputation inside a compiled backward cannot be
        detected.
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
    elements = 0
    for value in named.values():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        payload = payload or tensors
        elements = max(elements, sum(x.numel() for x in tensors))
    if op == "all_gather" and not any(key.startswith("out") for key in named):
        # A functional all-gather has only its input as an argument.
        elements *= named["group_size"]
    group = process_groups.group_name_of(named.get("group_name", named.get("process_group")))
    return Collective(op, group, payload[0].dtype, elements)


class ScopeTracker:
    """Follows a model, or a stage without its ends, through forward and backward until closed.

    Forward hooks record the running part, and the sequence numbers of the autograd nodes that it
    creates. In backward the running node's number identifies the part, also of compiled and
    checkpointed blocks. FSDP2 prefetches weights, so its calls are attributed to the parameters'
    owner.
    """

    def __init__(
        self, model_parts: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()
    ) -> None:
        self.hooks = ExitStack()
        keep = self.hooks.enter_context  # a handle, which is removed at the end
        self.outside: str | None = None  # the scope of what an optimizer or a caller sends
        self._stack: list[str] = []
        self._ranges: list[tuple[int, int, str]] = []
        self._model_ends: list[int] = []
        self.owner: str | None = None  # the unit of its own for which FSDP2 runs
        self._last = STEP
        self._in_loss = False
        self._recomputing = 0
        for part in model_parts:
            # The root before its children: the loss is between the end of the root's forward and
            # its backward. The root's own parameter is the final norm's.
            keep(part.register_forward_hook(self._end_model))
            self._own_unit(part, "head")
            self._follow("embedding", getattr(part, "tok_embeddings", None))
            for name, block in part.get_submodule("layers").named_children():
                self._follow(f"block {name}", block)
            self._follow("head", getattr(part, "output", None))

        for optimizer in optimizers:
            keep(optimizer.register_step_pre_hook(lambda *_: setattr(self, "outside", OPTIMIZER)))
            keep(optimizer.register_step_post_hook(lambda *_: setattr(self, "outside", None)))

    def here(self) -> tuple[str, str, bool]:
        """Return scope, pass (forward, backward, optimizer), and whether it is a recomputation."""
        if self.outside is not None:
            return self.outside, "optimizer", False
        if autograd.backward_number() is not None:
            number = autograd.running_node_number()
            if self.owner is None and number is not None:
                # The last range first: a later micro-batch's numbers are larger.
                owners = (scope for a, b, scope in reversed(self._ranges) if a <= number < b)
                in_loss = bool(self._model_ends) and number >= self._model_ends[0]
                self._last = next(owners, LOSS if in_loss else self._last)
            return self.owner or self._last, "backward", self._recomputing > 0
        if self.owner or self._stack:
            return self.owner or self._stack[-1], "forward", False
        return (LOSS, "forward", False) if self._in_loss else (STEP, "optimizer", False)

    def _end_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._in_loss = True
        self._model_ends.append(autograd.next_node_number())
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leave = leaf.register_hook(lambda _: setattr(self, "_in_loss", False))
                self.hooks.enter_context(leave)

    def _follow(self, scope: str, module: nn.Module | None) -> None:
        if module is None:
            return
        starts: list[int] = []

        def before(*_: Any) -> None:
            self._in_loss = False
            self._stack.append(scope)
            starts.append(autograd.next_node_number())

        def after(*_: Any) -> None:
            self._stack.pop()
            self._ranges.append((starts.pop(), autograd.next_node_number(), scope))

        # Before FSDP's hook, which creates the node that reduces the gradients.
        keep = self.hooks.enter_context
        keep(module.register_forward_pre_hook(before, prepend=True))
        keep(module.register_forward_hook(after))
        self._own_unit(module, scope)
        for inner in autograd.checkpointed_modules(module):
            keep(inner.register_forward_pre_hook(lambda *_: self._recompute(1)))
            # Recomputation may stop early with an exception.
            keep(inner.register_forward_hook(lambda *_: self._recompute(-1), always_call=True))

    def _recompute(self, change: int) -> None:
        # The first forward pass runs the inner module too.
        self._recomputing += change * (autograd.backward_number() is not None)

    def _own_unit(self, module: nn.Module, scope: str) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def owned(*args: Any, **kwargs: Any) -> Any:
                outer, self.owner = self.owner, scope
                try:
                    return original(*args, **kwargs)
                finally:
                    self.owner = outer

            return owned

        self.hooks.callback(wrap_unit_calls(module, wrap))
