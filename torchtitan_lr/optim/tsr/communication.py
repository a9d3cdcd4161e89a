# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Communication of a TSR-Adam step: sum cores and dense gradients, compute new bases.

The optimizer reduces over the replicate dimension: FSDP sums gradients over the shards only. Every
reduction is a plain SUM, since the loss is already divided by the tokens of the global batch.
`Synchronizer` has the operations of a step; `TSROptimizers` calls them in the order of Algorithm 1.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.tsr.randomized_svd import SVD, Answer, Gather, Request, Steps, Sum
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.titan import logger

if TYPE_CHECKING:
    from torchtitan_lr.optim.tsr.optimizer import MatrixStack

ParamRef = tuple[int, int]
"""A parameter: number of its stack and index in it, or `DENSE` and its index."""

DENSE = -1
"""Stands for the number of a stack in the `ParamRef` of a parameter that is not compressed."""

BUCKET_ELEMENTS = 2**26
"""Elements of a bucket of dense gradients, and of the sketches in memory at a time."""


@dataclass(frozen=True)
class Layout:
    """The mesh dimensions that split a matrix, by index in the run's common order.

    Args:
        rows: Those that split its rows.
        columns: Those that split its columns.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReductionGroups:
    """The process groups of a run.

    Args:
        sharding: Mesh dimensions that split parameters, by name, in the run's common order.
        replicas: Ranks with equal parameters and different data; None if there is only one.
        stages: Pipeline ranks; None without pipelining.
    """

    sharding: Mapping[str, dist.ProcessGroup]
    replicas: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None


@dataclass
class Refresh:
    """New bases of some matrices of one stack, applied when the step is accepted.

    Args:
        number: Of the stack.
        indices: The matrices.
        left: U (b, m, r).
        right: V (b, n, r), or None if that side is not projected.
        core: The core in the new bases, (b, r, r) or (b, r, n).
        overlaps: U₊ᵀU and V₊ᵀV (b, r, r), if moments are rotated.
    """

    number: int
    indices: list[int]
    left: Tensor
    right: Tensor | None
    core: Tensor
    overlaps: tuple[Tensor, Tensor | None] | None = None


class Synchronizer:
    """The communication of a step for all model parts of a rank.

    Args:
        stacks: The compressed matrices of all parts.
        dense: The other parameters, each with the mesh dimensions that shard it.
        groups: The process groups.
        settings: The settings.
        order: All parameters in the order in which backward is expected to produce gradients.

    Attributes:
        all_cores: All cores of a step in one buffer, which one call clears, scales or sends. The
            stacks' cores are views of it.
        sums: Those of the running step.
    """

    def __init__(
        self,
        stacks: Sequence["MatrixStack"],
        dense: Sequence[tuple[Tensor, tuple[int, ...]]],
        groups: ReductionGroups,
        settings: TSRSettings,
        order: Sequence[ParamRef],
    ) -> None:
        self.stacks, self.dense, self.groups, self.settings = stacks, dense, groups, settings
        self.order = order
        self._projected: set[ParamRef] = set()
        self.sums = EarlySums([], order, self._start_sum, early=False)
        sizes = [stack.average.numel() for stack in stacks]
        # A pipeline stage may have no compressed matrix.
        like = stacks[0].average if stacks else local_part(dense[0][0])
        self.all_cores = like.new_zeros(sum(sizes))
        for stack, core in zip(stacks, self.all_cores.split(sizes), strict=True):
            stack.core = core.view(stack.average.shape)

    def begin(self, due: Sequence[Sequence[int]]) -> None:
        """Zero the cores for a new step and plan its sums; the memory is reused.

        Args:
            due: The matrices that refresh in this step, by stack.
        """
        self.sums.wait()  # of a step that was abandoned
        self.all_cores.zero_()
        self._projected = set(self._kept(due))
        # A pipeline runs backward several times before a gradient is complete.
        early = self.groups.stages is None and self.settings.overlap_buckets > 1
        projected = [ref for ref in self.order if ref in self._projected]
        buckets = self._split(projected, [self.stacks[n].core[0].numel() for n, _ in projected])
        # Dense parameters, and matrices that refresh from their dense gradient, by dtype.
        whole = [ref for ref in self.order if ref[0] == DENSE]
        for number, indices in enumerate(due):
            if self.stacks[number].sends_dense:
                whole += [(number, index) for index in indices]
        by_dtype: dict[torch.dtype, list[ParamRef]] = defaultdict(list)
        for ref in whole:
            by_dtype[self._parameter(ref).dtype].append(ref)
        for same in by_dtype.values():
            sizes = [local_part(self._parameter(ref)).numel() for ref in same]
            buckets += self._split(same, sizes, BUCKET_ELEMENTS)
        self.sums = EarlySums(buckets, self.order, self._start_sum, early)

    def receive(self, ref: ParamRef) -> bool:
        """Note a gradient that backward has produced.

        FSDP's gradients of one unit share their memory. A small one that is kept is copied, so that
        it does not keep the large ones alive.

        Returns:
            Whether it is now to be projected and freed.

        Raises:
            RuntimeError: The sum that it belongs to has already started.
        """
        gradient = self._parameter(ref).grad
        if gradient is None:
            return False
        if self.sums.has_started(ref):
            raise RuntimeError(
                "a parameter received a second gradient after its sum over the replicas had "
                "started; set optimizer.tsr_overlap_buckets = 1"
            )
        part = local_part(gradient)
        if ref[0] == DENSE and part.untyped_storage().nbytes() > 2 * part.nbytes:
            self._parameter(ref).grad = gradient.clone()
        return ref in self._projected

    def left_over(self) -> Iterator[ParamRef]:
        """Yield the parameters whose gradient is there to be projected: no hook has seen it."""
        for ref in self.order:
            if ref in self._projected and self._parameter(ref).grad is not None:
                yield ref

    def finish_sums(self) -> list[Tensor]:
        """Wait for all sums.

        Returns:
            The gradient of every dense parameter, in order: this rank's parts.
        """
        self.sums.wait()
        return [_whole_gradient(parameter) for parameter, _ in self.dense]

    def new_bases(self, due: Sequence[Sequence[int]]) -> list[Refresh]:
        """Decompose the gradients of the matrices that are due.

        Matrices are decomposed in rounds whose sketches fit into one bucket. Those of one round
        make the same number of power iterations.

        Returns:
            Their bases and cores, equal on all replicas; not yet applied.
        """
        flat = [(number, index) for number, indices in enumerate(due) for index in indices]
        sizes = [self.stacks[number].sketch_size for number, _ in flat]
        found = []
        for bucket in split_buckets(sizes, BUCKET_ELEMENTS):
            rounds: dict[int, dict[int, list[int]]] = {}
            for number, index in (flat[i] for i in bucket):
                iterations = self.stacks[number].plan.power_iterations
                rounds.setdefault(iterations, {}).setdefault(number, []).append(index)
            for matrices in rounds.values():
                found += self._decompose(matrices)
        return found

    def norm(
        self,
        due: Sequence[Sequence[int]],
        refreshes: Sequence[Refresh],
        gradients: Sequence[Tensor],
    ) -> Tensor:
        """Return sqrt(Σ|C|² + Σ|g|²) of all cores and dense gradients, equal on all ranks.

        Args:
            due: The matrices that refresh; the cores of the others are already summed.
            refreshes: Returned by `new_bases`.
            gradients: Returned by `finish_sums`.
        """
        pieces = [(self.stacks[n].core[i], self.stacks[n].core_dims) for n, i in self._kept(due)]
        if not any(due) and not any(stack.core_dims for stack in self.stacks):
            pieces = [(self.all_cores, ())]
        pieces += [(refresh.core, self.stacks[refresh.number].core_dims) for refresh in refreshes]
        pieces += zip(gradients, (dims for _, dims in self.dense), strict=True)
        return squared_norm(pieces, self.groups, self.all_cores.device).sqrt()

    def _kept(self, due: Sequence[Sequence[int]]) -> list[ParamRef]:
        """Return the matrices that keep their bases in this step."""
        stacks = enumerate(self.stacks)
        return [(n, i) for n, stack in stacks for i in range(len(stack)) if i not in due[n]]

    def _parameter(self, ref: ParamRef) -> Tensor:
        number, index = ref
        return self.dense[index][0] if number == DENSE else self.stacks[number].parameters[index]

    def _split(
        self, refs: Sequence[ParamRef], sizes: Sequence[int], most: int | None = None
    ) -> list[list[ParamRef]]:
        limit = -(-sum(sizes) // self.settings.overlap_buckets)
        limit = limit if most is None else min(limit, most)
        return [[refs[i] for i in bucket] for bucket in split_buckets(sizes, limit)]

    def _start_sum(self, bucket: Sequence[ParamRef]) -> list["PendingSum"]:
        """Start the sum of a bucket over the replicas, if any; before it, cores over the shards."""
        if bucket[0] in self._projected:
            for dim, group in enumerate(self.groups.sharding.values()):
                # A one-sided core stays sharded along its long side: its blocks are no terms.
                terms = []
                for number, index in bucket:
                    stack = self.stacks[number]
                    splits = (*stack.layout.rows, *stack.layout.columns)
                    if dim in splits and dim not in stack.core_dims:
                        terms.append((number, index))
                sum_over(self._cores(terms), group)
            tensors = self._cores(bucket)
        else:
            tensors = [_whole_gradient(self._parameter(ref)) for ref in bucket]
        return [PendingSum(tensors, self.groups.replicas)] if self.groups.replicas else []

    def _cores(self, matrices: Sequence[ParamRef]) -> list[Tensor]:
        if len(matrices) == sum(len(stack) for stack in self.stacks):
            return [self.all_cores]  # no copy: the buffer itself is sent
        return [self.stacks[number].core[index] for number, index in matrices]

    def _decompose(self, matrices: Mapping[int, list[int]]) -> list[Refresh]:
        """Compute the new bases of one round, given its matrices by stack."""
        stacks = [self.stacks[number] for number in matrices]
        layouts = [stack.layout for stack in stacks]
        steps = [self.stacks[n].decompose(i, self.groups) for n, i in matrices.items()]
        svds: list[SVD] = solve_together(steps, layouts, self.groups)
        names = [self.stacks[n].plans[i].name for n, indices in matrices.items() for i in indices]
        # One batch per matrix: a difference is repaired and logged for that matrix only.
        batches = [list(batch) for svd in svds for batch in zip(*svd, strict=True)]
        if drifted := repair_drift(batches, self.groups.replicas):
            logger.warning(
                "Replicas computed different bases for %s; the first replica's are used",
                ", ".join(names[i] for i in drifted),
            )
        refreshes = []
        for (number, indices), stack, svd in zip(matrices.items(), stacks, svds, strict=True):
            # In the new bases UᵀGV is diag(σ), and UᵀG is diag(σ)Vᵀ: nothing is sent for it.
            if stack.plan.two_sided:
                core = torch.diag_embed(svd.values)
                refreshes.append(Refresh(number, indices, svd.left, svd.right, core))
            else:
                core = svd.values[..., None] * svd.right.mT
                refreshes.append(Refresh(number, indices, svd.left, None, core))
        if self.settings.moments == "rotate":
            products = [
                _overlaps(refresh, *stack.bases(refresh.indices))
                for refresh, stack in zip(refreshes, stacks, strict=True)
            ]
            overlaps = solve_together(products, layouts, self.groups)
            for refresh, found in zip(refreshes, overlaps, strict=True):
                refresh.overlaps = found
        return refreshes


def _overlaps(
    new: Refresh, old_left: Tensor, old_right: Tensor | None
) -> Steps[tuple[Tensor, Tensor | None]]:
    """Compute U₊ᵀU and V₊ᵀV from row-sharded bases."""
    left = yield Sum(new.left.mT @ old_left, "rows", replicas=False)
    assert isinstance(left, Tensor)
    if new.right is None or old_right is None:
        return left, None
    right = yield Sum(new.right.mT @ old_right, "columns", replicas=False)
    assert isinstance(right, Tensor)
    return left, right


def _whole_gradient(parameter: Tensor) -> Tensor:
    """Return the local gradient for summing in place; create zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


class EarlySums:
    """The sums of one step: each starts when all its gradients are there, in a fixed order.

    Autograd may produce gradients in another order on another rank. A bucket therefore waits for
    all buckets before it.

    Args:
        buckets: The parameters of each sum.
        order: Every parameter, in the order in which backward is expected to produce gradients.
        start: Starts the sum of a bucket; returns what to wait for.
        early: Whether sums may start before `start_rest`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[ParamRef]],
        order: Sequence[ParamRef],
        start: Callable[[Sequence[ParamRef]], Iterable["PendingSum"]],
        early: bool,
    ) -> None:
        position = {ref: index for index, ref in enumerate(order)}
        self._buckets = sorted(buckets, key=lambda bucket: max(position[ref] for ref in bucket))
        self._missing = [set(bucket) for bucket in self._buckets]
        self._number = {ref: i for i, bucket in enumerate(self._buckets) for ref in bucket}
        self._start, self._early = start, early
        self._started = 0
        self._pending: list[PendingSum] = []

    def has_started(self, ref: ParamRef) -> bool:
        """Return whether the sum with a parameter has started: it takes no other gradient."""
        return self._number.get(ref, self._started) < self._started

    def ready(self, ref: ParamRef) -> None:
        """Mark a parameter whose gradient is complete; start the sums that are complete."""
        if ref in self._number:
            self._missing[self._number[ref]].discard(ref)
        while self._early and self._started < len(self._buckets):
            if self._missing[self._started]:
                return
            self._start_next()

    def start_rest(self) -> None:
        """Start all other sums; a parameter that is not marked has no gradient."""
        while self._started < len(self._buckets):
            self._start_next()

    def wait(self) -> None:
        """Wait for all sums that have started."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def _start_next(self) -> None:
        self._started += 1
        self._pending += self._start(self._buckets[self._started - 1])


class PendingSum:
    """An asynchronous all-reduce of several tensors in one message.

    Args:
        tensors: Summed in place by `wait`.
        group: The ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._tensors = list(tensors)
        first = self._tensors[0]
        if len(self._tensors) == 1 and first.is_contiguous():
            self._wire = first
        else:
            self._wire = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        self._work = dist.all_reduce(self._wire, group=group, async_op=True)

    def wait(self) -> None:
        """Wait, and copy the sums into the tensors."""
        assert self._work is not None
        self._work.wait()
        if self._wire is not self._tensors[0]:
            parts = self._wire.split([tensor.numel() for tensor in self._tensors])
            views = [part.view(t.shape) for part, t in zip(parts, self._tensors, strict=True)]
            torch._foreach_copy_(self._tensors, views)


def sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors of one dtype in place over a group, in one call; do nothing without either."""
    if group is not None and tensors:
        PendingSum(tensors, group).wait()


def split_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split a list into consecutive buckets of at most ``limit`` elements, or one larger entry.

    Args:
        sizes: Elements of each entry.
        limit: Elements of a bucket.
    """
    result: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not result or size > room:
            result.append([])
            room = limit
        result[-1].append(index)
        room -= size
    return result


def solve_together(
    computations: Sequence[Steps[Any]], layouts: Sequence[Layout], groups: ReductionGroups
) -> list[Any]:
    """Run computations side by side and merge each round of their requests into collectives.

    Args:
        computations: In the same order on all ranks.
        layouts: The layout of each computation's matrices.
        groups: The process groups.
    """
    results: list[Any] = [None] * len(computations)
    answers: dict[int, Answer] = dict.fromkeys(range(len(computations)))
    while answers:
        requests: dict[int, Request] = {}
        for index, answer in answers.items():
            try:
                requests[index] = computations[index].send(answer)
            except StopIteration as end:
                results[index] = end.value
        answers = _answer(requests, layouts, groups)
    return results


def _answer(
    requests: Mapping[int, Request], layouts: Sequence[Layout], groups: ReductionGroups
) -> dict[int, Answer]:
    """Run one round: at most one call per kind of request and mesh dimension."""
    sums = {i: request for i, request in requests.items() if isinstance(request, Sum)}
    for dim, group in enumerate(groups.sharding.values()):
        split = [s.tensor for i, s in sums.items() if dim in getattr(layouts[i], s.axis)]
        sum_over(split, group)
    sum_over([s.tensor for s in sums.values() if s.replicas], groups.replicas)
    answers: dict[int, Answer] = {i: request.tensor for i, request in sums.items()}
    gathers = {i: request for i, request in requests.items() if isinstance(request, Gather)}
    answers |= dict.fromkeys(gathers)
    for dim, group in enumerate(groups.sharding.values()):
        concerned = {
            i: request.tensor
            for i, request in gathers.items()
            if request.mesh_dim == dim and dim in getattr(layouts[i], request.axis)
        }
        answers |= _gather(concerned, group)
    return answers


def _gather(tensors: Mapping[int, Tensor], group: dist.ProcessGroup) -> dict[int, Answer]:
    if not tensors:
        return {}
    own = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    everyone = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everyone, own, group=group)
    parts = everyone.view(group.size(), -1).split([t.numel() for t in tensors.values()], dim=1)
    return {
        index: (part.reshape(group.size(), *tensor.shape), group.rank())
        for (index, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def repair_drift(
    batches: Sequence[Sequence[Tensor]], replicas: dist.ProcessGroup | None
) -> list[int]:
    """Detect differences between replicas in tensors that each computed itself, and repair them.

    One all-reduce of two checksums per batch detects a difference in any bit. The first replica's
    tensors then replace the others'. Replicas on equal machines never differ, but one refresh with
    other bases would let them part for good.

    Args:
        batches: Groups of tensors; corrected in place.
        replicas: The replicas.

    Returns:
        Indices of the batches that differed, the same on all replicas.
    """
    if replicas is None or not batches:
        return []
    checksums = [torch.stack([_checksum(tensor) for tensor in batch]) for batch in batches]
    sums = torch.stack([of_batch.sum().remainder(2**62) for of_batch in checksums])
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replicas)
    high, low = extremes.view(2, -1)
    # The only host sync of a refresh besides the SVD's own: a broadcast must start on all ranks.
    wrong: list[int] = (high != -low).nonzero().flatten().tolist()
    for index in wrong:
        for tensor in batches[index]:
            dist.broadcast(tensor, group_src=0, group=replicas)
    return wrong


def _checksum(tensor: Tensor) -> Tensor:
    """Return a weighted sum of a tensor's bits as integers; int64 wraps around."""
    bits = tensor.contiguous().view(-1).view(torch.int32).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device).remainder_(8191).add_(1)
    return (bits * weights).sum()


def squared_norm(
    pieces: Sequence[tuple[Tensor, Sequence[int]]], groups: ReductionGroups, device: torch.device
) -> Tensor:
    """Sum the squares of tensors that are split over the mesh, each element once, in fp64.

    Args:
        pieces: This rank's parts, already summed over the replicas, each with the mesh dimensions
            that shard it. Along the other dimensions all ranks hold the same part.
        groups: The process groups; pipeline stages hold different parameters.
        device: Device of the result.

    Returns:
        A scalar, equal on all ranks.
    """
    places = [group.rank() for group in groups.sharding.values()]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part, dims in pieces:
        if all(place == 0 or dim in dims for dim, place in enumerate(places)):
            total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    for group in (*groups.sharding.values(), groups.stages):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total


def mesh_groups(parameters: Iterable[Tensor]) -> dict[str, dist.ProcessGroup]:
    """Return the parameters' mesh dimensions of more than one rank, with their groups.

    Returns:
        Process group by dimension name, in the mesh's order: the run's common order.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim, name in enumerate(mesh.mesh_dim_names or ()):
                if mesh.size(dim) > 1:
                    groups.setdefault(name, mesh.get_group(dim))
    return groups
