# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torch.distributed's operators and groups: the names that `torch.compile` and the ledger see.

The functional operators are what `torch.compile` can trace, and the only ones that take a group by
its name. The tables name every collective that torch dispatches: torch has no list of them, so they
are copied here.

Seen in torch 2.11 and 2.13. An operator that the table lacks is refused, not left out of the count.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

__all__ = [
    "GROUP_ARGUMENTS",
    "NAMESPACES",
    "NO_PAYLOAD",
    "OPERATIONS",
    "AsyncCollectiveTensor",
    "all_gather",
    "functional",
    "group_name_of",
    "group_size",
    "make_mesh_groups_by",
    "reduce_scatter",
]
# AsyncCollectiveTensor: what a functional collective returns outside of compiled code, a wrapper
# that waits when it is read. The ledger must let it unwrap itself. If it moves, the import fails.

functional = torch.ops._c10d_functional
"""The functional collectives as operators.

Their public wrappers (`torch.distributed._functional_collectives` is private, too) take meshes and
return wrappers; a compiled graph and an autograd function of ours need the bare operator. If an
operator is renamed or gets other arguments, the first forward under tensor parallelism fails.
"""

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Reduce-scatter of one tensor; ``reduce_scatter_tensor`` before torch 2.13, which warns of it."""

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""All-gather of one tensor; ``all_gather_into_tensor`` before torch 2.13, which warns of it."""

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


def group_name_of(group: Any) -> str:
    """Return the name of the group that a dispatched collective was given.

    A functional operator has the name itself. A ``c10d`` operator has a boxed object, which
    ``ProcessGroup.unbox`` opens: an undocumented method. If upstream removes it, the ledger fails
    with an AttributeError.

    Args:
        group: The argument ``group_name`` or ``process_group``.
    """
    if isinstance(group, str):
        return group
    unbox: Callable[[Any], Any] = getattr(dist.ProcessGroup, "unbox")  # noqa: B009
    group = group if isinstance(group, dist.ProcessGroup) else unbox(group)
    return str(group.group_name)


def group_size(name: str) -> int:
    """Return the ranks of a group, given its name.

    ``distributed_c10d._resolve_process_group`` is the only way from a name to a group. If upstream
    removes it, the ledger fails with an AttributeError.
    """
    return int(dist.distributed_c10d._resolve_process_group(cast(Any, name)).size())


def make_mesh_groups_by(new_group: Callable[..., Any]) -> None:
    """Let device meshes of this process make their groups by another function.

    For the ranks of a pool, whose many meshes share groups. Replaces the name ``new_group`` in
    ``torch.distributed.device_mesh``; if upstream no longer looks it up there, every mesh makes
    groups of its own, and the pool's ranks slow down.

    Args:
        new_group: Takes what `torch.distributed.new_group` takes.
    """
    from torch.distributed import device_mesh

    assert hasattr(device_mesh, "new_group"), "torch.distributed.device_mesh.new_group is gone"
    device_mesh.new_group = new_group
