# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The ledger of collectives: what really ran, by part of the model, pass, operation and mesh.

A dispatch mode sees every collective below autograd, whoever issued it: functional collectives of
tensor parallelism, those that ``torch.compile`` put into its generated code, and the ``c10d`` calls
of FSDP2, of the optimizer or of the trainer. Two things say whose it was: forward hooks name the
part that is running, and remember which autograd nodes it made; in backward the running node's
number names the part again. The model and the plans know nothing of it.

Elements are those of the logical tensor, once per call: the input of an all-reduce or
reduce-scatter, the output of an all-gather, the message of a broadcast or send. Bytes are
elements times item size on one rank, not wire volume.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.collectives import AsyncCollectiveTensor, group_size
from torchtitan_lr.compat.dispatch import TorchDispatchMode
from torchtitan_lr.ledger.operations import identify
from torchtitan_lr.ledger.scopes import ScopeTracker
from torchtitan_lr.parallel.pipeline.boundaries import boundary_of

COMBINED_DIMS = ("batch", "loss")
"""torchtitan's names for several dimensions at once; they may share the group of a single one."""

_WRAPPERS = (DTensor, AsyncCollectiveTensor)


@dataclass(frozen=True)
class Entry:
    """What rows are told apart by."""

    scope: str
    pass_: str
    op: str
    mesh_dim: str
    dtype: torch.dtype
    recompute: bool


class CommLedger(TorchDispatchMode):
    """Counts the collectives issued by this rank inside a ``with`` block, groups of one aside.

    Entering again goes on counting; `clear` starts anew. Compiled blocks are counted as they run:
    entering neither recompiles them nor makes them run eagerly.

    Args:
        model_parts: The model, or this rank's pipeline stages.
        mesh_dims: Name of the mesh dimension by process-group name, see `mesh_dims_of`. A group
            that it does not know is reported under its own name.
    """

    supports_higher_order_operators = True  # compiled code repeats random operators through one

    def __init__(self, model_parts: Sequence[nn.Module], mesh_dims: Mapping[str, str]) -> None:
        super().__init__()
        self._mesh_dims = dict(mesh_dims)
        self._tracker = ScopeTracker(model_parts)
        self._sizes: dict[str, int] = {}
        self._calls: Counter[Entry] = Counter()
        self._elements: Counter[Entry] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled; its collectives pass through the dispatcher too."""
        return True

    def __enter__(self) -> "CommLedger":
        self._tracker.attach()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._tracker.detach()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # they first: this mode sees what they call on local tensors
        kwargs = kwargs or {}
        call = identify(func, args, kwargs)
        if call is not None and self._ranks(call.group) > 1:
            # Only then: a received gradient keeps its mark while other collectives take it in.
            message = boundary_of(args) if call.op in ("send", "recv") else None
            scope, pass_, recompute = (*message, False) if message else self._tracker.here()
            mesh_dim = self._mesh_dims.get(call.group, call.group)
            entry = Entry(scope, pass_, call.op, mesh_dim, call.dtype, recompute)
            self._calls[entry] += 1
            self._elements[entry] += call.elements
        return func(*args, **kwargs)

    def clear(self) -> None:
        """Forget what was counted."""
        self._calls.clear()
        self._elements.clear()

    def rows(self, split_recompute: bool = False) -> list[dict[str, Any]]:
        """Return what was counted.

        Args:
            split_recompute: Whether collectives that ran again for activation checkpointing,
                which are part of the backward pass, get rows of their own and a key
                ``recompute``. Repetition inside a compiled backward cannot be told from outside
                and is never flagged; it is counted all the same.

        Returns:
            One dictionary per row with the keys ``scope`` (``block 0`` ..., between pipeline
            stages ``boundary 0`` ..., ``embedding``, ``head``, ``loss``, ``step``), ``pass``
            (``forward``, ``backward``, ``optimizer``), ``op``, ``mesh_dim``, ``dtype``,
            ``calls``, ``elements`` and ``bytes``.
        """
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for entry, calls in self._calls.items():
            flags = {"recompute": entry.recompute} if split_recompute else {}
            names = {
                "scope": entry.scope,
                "pass": entry.pass_,
                "op": entry.op,
                "mesh_dim": entry.mesh_dim,
                "dtype": str(entry.dtype).removeprefix("torch."),
                **flags,
            }
            row = merged.setdefault(
                tuple(names.values()), names | {"calls": 0, "elements": 0, "bytes": 0}
            )
            row["calls"] += calls
            row["elements"] += self._elements[entry]
            row["bytes"] += self._elements[entry] * entry.dtype.itemsize
        return in_reading_order(merged.values())

    def _ranks(self, group: str) -> int:
        if group not in self._sizes:
            self._sizes[group] = group_size(group)
        return self._sizes[group]

    def bytes_by_mesh_dim(self) -> dict[str, int]:
        """Return the bytes of every mesh dimension, for the metrics."""
        total: Counter[str] = Counter()
        for row in self.rows():
            total[row["mesh_dim"]] += row["bytes"]
        return dict(sorted(total.items()))


def ledger_for(parallel_dims: Any, model_parts: Sequence[nn.Module]) -> CommLedger:
    """Build the ledger of a torchtitan run.

    Args:
        parallel_dims: torchtitan's ParallelDims, which names the process groups.
        model_parts: The model, or this rank's pipeline stages.
    """
    meshes = parallel_dims.get_all_one_dimensional_meshes()
    names = sorted(meshes, key=lambda name: name in COMBINED_DIMS)
    return CommLedger(model_parts, mesh_dims_of({name: meshes[name] for name in names}))


def mesh_dims_of(meshes: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the mesh dimension by process-group name.

    Args:
        meshes: One-dimensional DeviceMeshes by the name of their dimension. The whole world is
            always known, as ``world``. Where two names share a group the first one stands.
    """
    names: dict[str, str] = {}
    for name, mesh in meshes.items():
        names.setdefault(mesh.get_group().group_name, name)
    if dist.is_initialized() and dist.group.WORLD is not None:
        names.setdefault(dist.group.WORLD.group_name, "world")
    return names


def in_reading_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows as a step passes through the model, then by pass and operation."""
    return sorted(rows, key=_reading_order)


def _reading_order(row: dict[str, Any]) -> tuple[Any, ...]:
    order = {"embedding": 0, "block": 1, "boundary": 2, "head": 3, "loss": 4, "step": 5}
    name, _, index = row["scope"].partition(" ")
    passes = ("forward", "backward", "optimizer")
    rest = (row["op"], row["mesh_dim"], row["dtype"], row.get("recompute", False))
    return (order.get(name, 6), int(index or 0), passes.index(row["pass"]), *rest)
