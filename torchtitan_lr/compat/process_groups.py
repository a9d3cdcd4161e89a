# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Operators and groups of torch.distributed, for `torch.compile` and the ledger.

Importing this gives every gloo group of this process one worker thread. Torch 2.8 to 2.15 has
two, which both free the buffer of a name if a functional all-gather is in flight with another
collective; that ends the process.

`torch.compile` traces the functional operators only. Torch has no list of its collectives; the
ledger raises for one that is not in the table. Tested with torch 2.11, 2.13 and 2.15.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# The result of a functional collective outside compiled code, a wrapper that waits when it is read.
# The ledger must let it unwrap itself.
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

functional = torch.ops._c10d_functional
"""The functional collectives as operators.

The wrappers in `torch.distributed._functional_collectives` (also private) take meshes and return
wrappers; compiled graphs and our autograd functions need the bare operator.
"""

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Reduce-scatter of one tensor; torch 2.13 deprecates ``reduce_scatter_tensor``."""

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""All-gather of one tensor; torch 2.13 deprecates ``all_gather_into_tensor``."""


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of a group's ranks, all of one shape: (ranks, ...)."""
    everyone = tensor.new_empty(group.size(), *tensor.shape)
    all_gather(everyone.view(-1), tensor.reshape(-1), group=group)
    return everyone


NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of ``torch.distributed``'s own operators and of the functional ones."""

GROUP_ARGUMENTS = frozenset({"group_name", "process_group"})
"""Names of group arguments. An operator without a group sends nothing (it waits or wraps)."""

NO_PAYLOAD = frozenset({"barrier", "monitored_barrier_"})
"""Operators with a group argument that send no tensor data."""

_TABLE = """
all_reduce: all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_
all_reduce: allreduce_ allreduce_coalesced_
reduce_scatter: reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced
reduce_scatter: reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_
all_gather: all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced
all_gather: allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_
all_to_all: all_to_all_single alltoall_ alltoall_base_
broadcast: broadcast broadcast_
reduce: reduce_
gather: gather_ gather_into_tensor_
scatter: scatter_
send: send isend
recv: recv_ recv_any_source_ irecv
send_recv: batch_p2p_ops
"""

OPERATIONS: dict[str, str] = {}
"""Maps every operator to its common name."""

for _line in _TABLE.split("\n"):
    _common, _, _operators = _line.partition(": ")
    OPERATIONS |= dict.fromkeys(_operators.split(), _common)


def _give_gloo_one_worker() -> None:
    # Both worker threads of a gloo group write the name of a completed operation into one string,
    # without a lock (``ProcessGroupGloo::runLoop``, torch 2.8 to 2.15): a name of more than 15
    # characters is freed twice, and the process dies later. One worker cannot wait for itself: the
    # tags of a group's collectives require the same order on all ranks.
    # Torch ignores ``pg_options`` for gloo, so this replaces the constructor. If ``_Options`` or a
    # field of it is renamed, the first group raises an AttributeError.
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know no options
    construct = gloo.__init__

    def init(
        group: Any,
        store: dist.Store,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: timedelta | None = None,
        **fields: Any,  # torch 2.15: ``enable_reconfigure``
    ) -> None:
        if options is None:
            # The options that torch would use; no Python object of them exists before the group.
            options = gloo._Options()
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [gloo.create_device(interface=name) for name in names]
            options._devices = options._devices or [gloo.create_default_device()]
            options._timeout = timeout or options._timeout
            for name, value in fields.items():
                setattr(options, name, value)
        options._threads = 1
        construct(group, store, rank, size, options)

    gloo.__init__ = init


if dist.is_gloo_available():
    _give_gloo_one_worker()


_SECOND: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_FIRST_NAMES: dict[str, str] = {}


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return one other group of the same ranks, whose calls do not wait for this one's.

    Every rank must call this. Groups of the ``fake`` backend are returned as they are.
    """
    if dist.get_backend(group) == "fake":
        return group
    if group not in _SECOND:
        ranks = dist.get_process_group_ranks(group)
        # With global synchronization every rank would need the lists of all groups: W² numbers.
        second = dist.new_group(ranks, use_local_synchronization=True)
        _SECOND[group] = second
        _FIRST_NAMES[str(second.group_name)] = str(group.group_name)
    return _SECOND[group]


def joint_group(mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of the ranks along some dimensions; every rank of the mesh must call this."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    own = mesh.get_coordinate()
    assert own is not None
    place = tuple(slice(None) if dim in dims else own[dim] for dim in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[place].flatten().tolist()
    return dist.new_group(ranks, use_local_synchronization=True)


def set_timeouts(timeout: timedelta, besides: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of this rank's process groups but one; torch's is up to 30 minutes."""
    # Uses ``distributed_c10d._set_pg_timeout``, as torchtitan does for some groups of its meshes,
    # and ``_world``, which alone knows all groups. Groups of the fake backend have no time-out.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not besides and dist.get_backend(group) != "fake":
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def write_flight_record() -> None:
    """Write gloo's record of collectives where NCCL writes its own, as torchtitan configures."""
    place = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    # If the undocumented ``_dump_fr_trace`` is renamed, nothing is written, and a test fails.
    if place and dist.is_initialized() and dist.get_backend() == "gloo":
        with suppress(OSError, AttributeError), open(f"{place}{dist.get_rank()}", "wb") as file:
            file.write(getattr(torch._C._distributed_c10d, "_dump_fr_trace")())  # noqa: B009


def group_name_of(group: Any) -> str:
    """Return the name of a dispatched collective's group; a `second_group` has the first's name."""
    # A functional operator takes the name itself. A ``c10d`` operator takes a boxed object, which
    # the undocumented ``ProcessGroup.unbox`` unwraps.
    if not isinstance(group, str):
        unbox: Callable[[Any], Any] = getattr(dist.ProcessGroup, "unbox")  # noqa: B009
        group = group if isinstance(group, dist.ProcessGroup) else unbox(group)
        group = str(group.group_name)
    return _FIRST_NAMES.get(group, group)


def group_size(name: str) -> int:
    """Return the number of ranks of a named group; torch has no public way from name to group."""
    return int(dist.distributed_c10d._resolve_process_group(cast(Any, name)).size())
