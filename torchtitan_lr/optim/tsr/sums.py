# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a TSR-Adam step sends: sums of cores and dense gradients, and the exchange of a refresh.

FSDP sums gradients over the shards only; TSR-Adam sums over the replicas itself. Every reduction is
a plain SUM. Sums over the replicas may travel in bf16; terms of a core or a sketch that shards of
one matrix add up stay as they are. Nothing here knows the algorithm: the functions take tensors and
process groups.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lr.agreement import from_all_ranks
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compat.process_groups import all_gather
from torchtitan_lr.optim.buckets import split_buckets

Axis = Literal["rows", "columns"]


@dataclass(frozen=True)
class Layout:
    """The mesh dimensions that split a matrix's rows and columns, by index in the run's order."""

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def mesh_dims(self, axis: Axis) -> tuple[int, ...]:
        """Return the mesh dimensions that split one axis."""
        return self.rows if axis == "rows" else self.columns

    def largest_block(self, m: int, n: int, ranks: Sequence[int]) -> tuple[int, int]:
        """Return the sides of a rank's largest block of (m, n): all ranks must decide alike."""
        for dim in self.rows:
            m = -(-m // ranks[dim])
        for dim in self.columns:
            n = -(-n // ranks[dim])
        return m, n


@dataclass(frozen=True)
class Groups:
    """The process groups of a run."""

    sharding: Mapping[str, dist.ProcessGroup]
    """Mesh dimensions that split parameters, by name, in the run's common order."""
    replicas: dist.ProcessGroup | None = None
    """Ranks with equal parameters and different data; None if there is only one."""
    stages: dist.ProcessGroup | None = None
    """Pipeline ranks; None without pipelining."""
    wire_dtype: torch.dtype | None = None
    """Dtype in which sums over the replicas travel; None for the tensors' own."""

    @classmethod
    def of(
        cls,
        parameters: Iterable[Tensor],
        replicas: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> "Groups":
        """Read the mesh dimensions of more than one rank from parameters; the others as above."""
        sharding: dict[str, dist.ProcessGroup] = {}
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                for dim, name in enumerate(mesh.mesh_dim_names or ()):
                    if mesh.size(dim) > 1:
                        sharding.setdefault(name, mesh.get_group(dim))
        return cls(sharding, replicas, stages, wire_dtype)

    def sum_over_replicas(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start the sum of tensors over the replicas, see `sum_over`."""
        return sum_over(tensors, self.replicas, self.wire_dtype)

    def of_all_stages(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all pipeline stages, each of which knows its own."""
        if self.stages is None:
            return dict(own)
        entries: dict[str, Any] = {}
        for of_stage in from_all_ranks(own, self.stages):
            entries |= of_stage
        return entries


def sum_over(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    wire_dtype: torch.dtype | None = None,
) -> Callable[[], None]:
    """Start the sum of tensors of one dtype over a group, in one message; return what waits for it.

    The sums are copied into the tensors. The message has their dtype, or another one.
    """
    if group is None or not tensors:
        return lambda: None
    first = tensors[0]
    dtype = wire_dtype or first.dtype
    is_message = len(tensors) == 1 and first.is_contiguous() and first.dtype == dtype
    message = first if is_message else torch.cat([t.reshape(-1).to(dtype) for t in tensors])
    work = dist.all_reduce(message, group=group, async_op=True)

    def wait() -> None:
        assert work is not None
        work.wait()
        if message is not first:
            parts = message.split([tensor.numel() for tensor in tensors])
            views = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
            torch._foreach_copy_(list(tensors), views)

    return wait


# The sums that start during backward.


def in_buckets(
    parameters: Sequence[Tensor], sizes: Sequence[int], count: int, most: int
) -> list[list[Tensor]]:
    """Split parameters into about ``count`` buckets of consecutive ones, of similar size.

    ``sizes`` are the elements that are sent for each, ``most`` is a bucket's limit of them.
    """
    limit = min(-(-sum(sizes) // count), most)
    buckets = []
    for places in split_buckets(sizes, limit):
        buckets.append([parameters[place] for place in places])
    return buckets


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, to sum in place; create zeros if there is none."""
    if parameter.grad is None:
        # Other replicas may have one: every rank takes part in the sum.
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


@dataclass(frozen=True)
class GradientSum:
    """The sum of dense gradients over the replicas: G ← ΣG."""

    parameters: Sequence[Tensor]
    """Of one dtype."""

    def start(self, groups: Groups) -> Callable[[], None]:
        """Start the sum; return what waits for it."""
        gradients = [local_gradient(parameter) for parameter in self.parameters]
        return groups.sum_over_replicas(gradients)


@dataclass(frozen=True)
class CoreSum:
    """The sum of cores over the ranks: C ← ΣC."""

    parameters: Sequence[Tensor]
    cores: Sequence[Tensor]
    """Of one dtype."""
    contracted: Sequence[Container[int]]
    """For each core the mesh dimensions whose ranks hold one term of it each."""
    buffer: Tensor | None
    """The memory of all cores of a rank, if these are all: it is sent without a copy."""

    def start(self, groups: Groups) -> Callable[[], None]:
        """Sum over the shards, then start the sum over the replicas; return what waits for it."""
        sent = self.cores if self.buffer is None else [self.buffer]
        for dim, group in enumerate(groups.sharding.values()):
            # Along a one-sided core's long side ranks hold different blocks: nothing to add.
            pairs = zip(self.cores, self.contracted, strict=True)
            terms = [core for core, dims in pairs if dim in dims]
            sum_over(sent if len(terms) == len(self.cores) else terms, group)()
        return groups.sum_over_replicas(sent)


class EarlySums:
    """The sums of one step: each starts when all its gradients are there, in a fixed order.

    Autograd may produce gradients in another order on another rank. A sum therefore waits for all
    sums before it, in the order in which backward is expected to produce all gradients.

    Attributes:
        started: The parameters whose sums have started: they take no other gradient.
    """

    def __init__(
        self, sums: Sequence[CoreSum | GradientSum], order: Sequence[Tensor], groups: Groups
    ) -> None:
        position = {parameter: index for index, parameter in enumerate(order)}
        in_turn = sorted(sums, key=lambda one: max(position[p] for p in one.parameters))
        self._waiting = deque((one, set(one.parameters)) for one in in_turn)  # and what is missing
        self._groups = groups
        self.started: set[Tensor] = set()
        self._pending: list[Callable[[], None]] = []

    def ready(self, parameter: Tensor) -> None:
        """Mark a parameter whose gradient is complete, and start the sums that are complete."""
        for _, missing in self._waiting:
            missing.discard(parameter)
        while self._waiting and not self._waiting[0][1]:
            self._start_next()

    def start_all(self) -> None:
        """Start the other sums too: whatever is not marked has no gradient on this rank."""
        while self._waiting:
            self._start_next()

    def wait(self) -> None:
        """Wait for all sums that have started."""
        for wait in self._pending:
            wait()
        self._pending.clear()

    def _start_next(self) -> None:
        one, _ = self._waiting.popleft()
        self.started.update(one.parameters)
        self._pending.append(one.start(self._groups))


class Exchange:
    """What the matrices of a refresh sum and gather: one message for all of them at a time.

    ``layouts`` are those of the matrices, or of stacks of them, in the same order on all ranks.
    """

    def __init__(self, layouts: Sequence[Layout], groups: Groups) -> None:
        self.layouts, self.groups = layouts, groups
        self.mesh_dims = range(len(groups.sharding))

    def sum(self, terms: Sequence[Tensor], axis: Axis, partial: Sequence[bool] = ()) -> None:
        """Sum this rank's terms in place, over the shards of an axis, which is contracted away.

        Those that are ``partial`` sums over the replicas are summed over these too.
        """
        for dim, group in enumerate(self.groups.sharding.values()):
            layouts = zip(terms, self.layouts, strict=True)
            sum_over([term for term, layout in layouts if dim in layout.mesh_dims(axis)], group)()
        of_replicas = zip(terms, partial, strict=True) if partial else ()
        self.groups.sum_over_replicas([term for term, sums in of_replicas if sums])()

    def gather(
        self, blocks: Sequence[Tensor], axis: Axis, mesh_dim: int
    ) -> list[tuple[Tensor, int] | None]:
        """Gather blocks from the ranks of a mesh dimension: (ranks, ...), and this rank's place.

        None for a matrix whose axis the dimension does not shard.
        """
        found: list[tuple[Tensor, int] | None] = [None] * len(blocks)
        split = [i for i, own in enumerate(self.layouts) if mesh_dim in own.mesh_dims(axis)]
        if not split:
            return found
        group = list(self.groups.sharding.values())[mesh_dim]
        own = torch.cat([blocks[i].reshape(-1) for i in split])
        everyone = own.new_empty(group.size() * own.numel())
        all_gather(everyone, own, group=group)
        parts = everyone.view(group.size(), -1).split([blocks[i].numel() for i in split], dim=1)
        for i, part in zip(split, parts, strict=True):
            found[i] = part.reshape(group.size(), *blocks[i].shape), group.rank()
        return found
