# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Recognising a collective in a dispatched operator, and reading its size off the arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
"""Of ``torch.distributed``'s own functions, and of the functional ones."""

GROUP_ARGUMENTS = frozenset({"group_name", "process_group"})
"""An operator without one of these moves nothing (it waits, or wraps a tensor)."""

NO_PAYLOAD = frozenset({"barrier", "monitored_barrier_"})
"""Operators that concern a group and move nothing."""

OPERATIONS: dict[str, str] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_to_all_single": "all_to_all",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "batch_p2p_ops": "send_recv",
}
"""The common name of every operator."""


@dataclass(frozen=True)
class Collective:
    """One call.

    Args:
        op: The operation's common name.
        group: Name of the process group.
        dtype: Of the payload.
        elements: Of the logical tensor: the larger side of the call.
    """

    op: str
    group: str
    dtype: torch.dtype
    elements: int


def identify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective | None:
    """Read a collective off a dispatched operator.

    Args:
        func: The operator's overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The call, or None where the operator moves no data between ranks.

    Raises:
        NotImplementedError: For an operator on a group that the ledger does not know: leaving it
            out silently would make every total wrong.
    """
    if getattr(func, "namespace", None) not in NAMESPACES:
        return None
    name = func._schema.name.partition("::")[2]
    parameters = [argument.name for argument in func._schema.arguments]
    if name in NO_PAYLOAD or GROUP_ARGUMENTS.isdisjoint(parameters):
        return None
    if name not in OPERATIONS:
        raise NotImplementedError(f"the ledger does not know the collective {func}")
    op = OPERATIONS[name]
    named = dict(zip(parameters, args, strict=False)) | kwargs
    tensors = {key: _tensors(value) for key, value in named.items()}
    payload = next(found for found in tensors.values() if found)
    elements = max(sum(t.numel() for t in found) for found in tensors.values())
    if op == "all_gather" and not any(key.startswith("out") for key in tensors):
        # A functional gather is known by its input alone.
        elements *= named["group_size"]
    return Collective(op, _group_name(named), payload[0].dtype, int(elements))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _group_name(named: dict[str, Any]) -> str:
    group = named.get("group_name", named.get("process_group"))
    if isinstance(group, str):
        return group
    unbox: Callable[[Any], Any] = getattr(dist.ProcessGroup, "unbox")  # noqa: B009
    group = group if isinstance(group, dist.ProcessGroup) else unbox(group)
    return str(group.group_name)
