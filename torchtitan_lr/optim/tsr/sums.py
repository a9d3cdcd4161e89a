# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a TSR-Adam step sends: sums of cores and dense gradients, and the rounds of a refresh.

FSDP sums gradients over the shards only; TSR-Adam sums over the replicas itself. Every reduction is
a plain SUM. Sums over the replicas may travel in bf16; terms of a core or a sketch that shards of
one matrix add up stay as they are. Nothing here knows the algorithm: the functions take tensors and
process groups.
"""

from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
        """Return the sides of a rank's largest block, with padding: all ranks must decide alike.

        Args:
            m: Rows of the whole matrix.
            n: Its columns.
            ranks: Size of every mesh dimension of the run.
        """
        for dim in self.rows:
            m = -(-m // ranks[dim])
        for dim in self.columns:
            n = -(-n // ranks[dim])
        return m, n


@dataclass(frozen=True)
class Groups:
    """The process groups of a run.

    Args:
        sharding: Mesh dimensions that split parameters, by name, in the run's common order.
        replicas: Ranks with equal parameters and different data; None if there is only one.
        stages: Pipeline ranks; None without pipelining.
        wire_dtype: Dtype in which sums over the replicas travel; None for the tensors' own.
    """

    sharding: Mapping[str, dist.ProcessGroup]
    replicas: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None
    wire_dtype: torch.dtype | None = None

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
    """Start the sum of tensors of one dtype over a group, in one message.

    Args:
        tensors: Summed in place.
        group: None for nothing to sum.
        wire_dtype: Dtype of the message; None for that of the tensors.

    Returns:
        A function that waits, and copies the sums into the tensors; nothing without a group.
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

    Args:
        parameters: All of what is sent for them has one dtype.
        sizes: Elements that are sent for each.
        count: Number of buckets.
        most: Elements of a bucket, at most.
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
    """The sum of dense gradients over the replicas: G ← ΣG.

    Args:
        parameters: The parameters, of one dtype.
    """

    parameters: Sequence[Tensor]

    def start(self, groups: Groups) -> Callable[[], None]:
        """Start the sum; return what waits for it."""
        gradients = [local_gradient(parameter) for parameter in self.parameters]
        return groups.sum_over_replicas(gradients)


@dataclass(frozen=True)
class CoreSum:
    """The sum of cores over the ranks: C ← ΣC.

    Args:
        parameters: Whose cores they are.
        cores: The cores, of one dtype.
        contracted: For each core the mesh dimensions whose ranks hold one term of it each.
        buffer: The memory of all cores of a rank, if these are all: it is sent without a copy.
    """

    parameters: Sequence[Tensor]
    cores: Sequence[Tensor]
    contracted: Sequence[Container[int]]
    buffer: Tensor | None

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
    sums before it.

    Args:
        sums: The sums.
        order: Every parameter, in the order in which backward is expected to produce gradients.
        groups: The process groups.

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


# A refresh's rounds of requests.


@dataclass(frozen=True)
class Sum:
    """Request: sum over the ranks that share an axis.

    Args:
        tensor: This rank's term, of the same shape on all these ranks; summed in place.
        axis: The axis whose shards are contracted away.
        replicas: Whether to sum over the replicas too.
    """

    tensor: Tensor
    axis: Axis
    replicas: bool


@dataclass(frozen=True)
class Gather:
    """Request: gather the blocks of all ranks of one mesh dimension, if it shards the axis.

    The answer is ``(blocks (ranks, ...), own index)``, or None if the dimension does not shard it.

    Args:
        tensor: This rank's block.
        axis: The axis.
        mesh_dim: Index of the dimension, in the run's common order.
    """

    tensor: Tensor
    axis: Axis
    mesh_dim: int


Request = Sum | Gather
Answer = Tensor | tuple[Tensor, int] | None
Result = TypeVar("Result")
Rounds = Generator[Request, Answer, Result]
"""A computation in rounds: each yields a request to other ranks, and receives the answer."""


def summed(tensor: Tensor, axis: Axis, replicas: bool) -> Rounds[Tensor]:
    """Return the `Sum` of a tensor."""
    answer = yield Sum(tensor, axis, replicas)
    assert isinstance(answer, Tensor)
    return answer


def solve_together(
    computations: Sequence[Rounds[Result]], layouts: Sequence[Layout], groups: Groups
) -> list[Result]:
    """Run computations side by side and merge each round of their requests into collectives.

    A round needs at most one call per kind of request and mesh dimension. The computations, each
    with the layout of its matrices, have the same order on all ranks.
    """
    results: dict[int, Result] = {}
    answers: dict[int, Answer] = dict.fromkeys(range(len(computations)))
    while answers:
        sums: dict[int, Sum] = {}
        gathers: dict[int, Gather] = {}
        for index, answer in answers.items():
            try:
                request = computations[index].send(answer)
            except StopIteration as end:
                results[index] = end.value
                continue
            if isinstance(request, Sum):
                sums[index] = request
            else:
                gathers[index] = request
        answers = _answer_sums(sums, layouts, groups)
        answers.update(_answer_gathers(gathers, layouts, groups))
    return [results[index] for index in range(len(computations))]


def _answer_sums(
    sums: Mapping[int, Sum], layouts: Sequence[Layout], groups: Groups
) -> dict[int, Answer]:
    """Sum tensors over the shards of their axis, then over the replicas, all in place."""
    for dim, group in enumerate(groups.sharding.values()):
        split = [s.tensor for i, s in sums.items() if dim in layouts[i].mesh_dims(s.axis)]
        sum_over(split, group)()
    groups.sum_over_replicas([s.tensor for s in sums.values() if s.replicas])()
    return {i: s.tensor for i, s in sums.items()}


def _answer_gathers(
    gathers: Mapping[int, Gather], layouts: Sequence[Layout], groups: Groups
) -> dict[int, Answer]:
    """Gather the blocks of the mesh dimension that each request asks for."""
    answers: dict[int, Answer] = dict.fromkeys(gathers)
    for dim, group in enumerate(groups.sharding.values()):
        asked: dict[int, Tensor] = {}
        for i, gather in gathers.items():
            if gather.mesh_dim == dim and dim in layouts[i].mesh_dims(gather.axis):
                asked[i] = gather.tensor
        if not asked:
            continue
        own = torch.cat([block.reshape(-1) for block in asked.values()])
        everyone = own.new_empty(group.size() * own.numel())
        all_gather(everyone, own, group=group)
        sizes = [block.numel() for block in asked.values()]
        parts = everyone.view(group.size(), -1).split(sizes, dim=1)
        for (i, block), part in zip(asked.items(), parts, strict=True):
            answers[i] = (part.reshape(group.size(), *block.shape), group.rank())
    return answers
