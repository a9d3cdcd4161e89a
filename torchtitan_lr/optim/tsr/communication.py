# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Communication of a TSR-Adam step: sum cores and dense gradients, compute new bases.

The optimizer reduces over the replicate dimension: FSDP sums gradients over the shards only. Every
reduction is a plain SUM, since the loss is already divided by the tokens of the global batch.
`Synchronizer` has the operations of a step; `TSROptimizers` calls them in the order of Algorithm 1.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.numerics import HostCopy, blocks, joint_norm
from torchtitan_lr.optim.selection import BUCKET_ELEMENTS, TSRSettings, split_buckets
from torchtitan_lr.optim.tsr.randomized_svd import SVD, Answer, Gather, Request, Steps, Sum, summed
from torchtitan_lr.titan import logger

if TYPE_CHECKING:
    from torchtitan_lr.optim.tsr.optimizer import MatrixStack

ParamRef = tuple[int, int]
"""A parameter: number of its stack and index in it, or `DENSE` and its index."""

DENSE = -1
"""Stands for the number of a stack in the `ParamRef` of a parameter that is not compressed."""

CHECKED = 2**18
"""Words of a checksum that are cast at a time."""


@dataclass(frozen=True)
class Layout:
    """The mesh dimensions that split a matrix's rows and columns, by index in the run's order."""

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

    @classmethod
    def of(cls, parameters: Iterable[Tensor], *more: dist.ProcessGroup | None) -> "ReductionGroups":
        """Read the mesh dimensions of more than one rank from parameters; `more` as above."""
        groups: dict[str, dist.ProcessGroup] = {}
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                for dim, name in enumerate(mesh.mesh_dim_names or ()):
                    if mesh.size(dim) > 1:
                        groups.setdefault(name, mesh.get_group(dim))
        return cls(groups, *more)


@dataclass
class Refresh:
    """New bases of some matrices of one stack, applied when the step is accepted.

    Args:
        stack: Their stack.
        indices: The matrices.
        left: U (b, m, r).
        right: V (b, n, r), or None if that side is not projected.
        core: The core in the new bases, (b, r, r) or (b, r, n).
        overlaps: U₊ᵀU and V₊ᵀV (b, r, r), if moments are rotated.
    """

    stack: "MatrixStack"
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
        due: The matrices that refresh in this step, by stack; None between steps.
        projected: The matrices that keep their bases in this step, stack after stack.
        drift: The matrices that were refreshed, and whether replicas computed different bases.
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
        self.due: list[list[int]] | None = None
        self.projected: dict[ParamRef, None] = {}
        self.sums = EarlySums([], order, self._start_sum, early=False)
        self.drift: list[tuple[list[tuple[MatrixStack, int]], HostCopy]] = []
        sizes = [stack.average.numel() for stack in stacks]
        # A pipeline stage may have no compressed matrix.
        like = stacks[0].average if stacks else local_part(dense[0][0])
        self.all_cores = like.new_zeros(sum(sizes))
        for stack, core in zip(stacks, self.all_cores.split(sizes), strict=True):
            stack.core = core.view(stack.average.shape)

    def begin(self, done: int) -> None:
        """Zero the cores for the step after ``done`` steps, and plan its refreshes and sums."""
        self.sums.wait()  # of a step that was abandoned
        self.all_cores.zero_()
        # All numbers are on the host.
        due = self.due = [
            [i for i, plan in enumerate(stack.plans) if plan.is_due(done, int(stack.refreshes[i]))]
            for stack in self.stacks
        ]
        stacks = list(enumerate(self.stacks))
        kept = [(n, i) for n, stack in stacks for i in range(len(stack.plans)) if i not in due[n]]
        self.projected = dict.fromkeys(kept)
        cores = [ref for ref in self.order if ref in self.projected]
        sizes = [self.stacks[number].core[0].numel() for number, _ in cores]
        kinds = [(cores, sizes, sum(sizes))]
        # Dense parameters, and matrices that refresh from their dense gradient, by dtype: one
        # message has one dtype.
        whole = [ref for ref in self.order if ref[0] == DENSE]
        whole += [(n, i) for n, stack in stacks if stack.sends_dense for i in due[n]]
        by_dtype: dict[torch.dtype, list[ParamRef]] = defaultdict(list)
        for ref in whole:
            by_dtype[self.parameter(ref).dtype].append(ref)
        for same in by_dtype.values():
            sizes = [local_part(self.parameter(ref)).numel() for ref in same]
            kinds.append((same, sizes, BUCKET_ELEMENTS))
        count, buckets = self.settings.overlap_buckets, []
        for refs, sizes, most in kinds:
            limit = min(-(-sum(sizes) // count), most)
            buckets += [[refs[i] for i in bucket] for bucket in split_buckets(sizes, limit)]
        # A pipeline runs backward several times before a gradient is complete.
        early = self.groups.stages is None and count > 1
        self.sums = EarlySums(buckets, self.order, self._start_sum, early)

    def parameter(self, ref: ParamRef) -> Tensor:
        """Return a parameter of this rank."""
        number, index = ref
        return self.dense[index][0] if number == DENSE else self.stacks[number].parameters[index]

    def _start_sum(self, bucket: Sequence[ParamRef]) -> Callable[[], None]:
        """Start the sum of a bucket over the replicas; before it, sum cores over the shards."""
        if bucket[0] not in self.projected:
            tensors = [whole_gradient(self.parameter(ref)) for ref in bucket]
            return sum_over(tensors, self.groups.replicas)
        cores = [self.stacks[number].core[index] for number, index in bucket]
        if len(bucket) == sum(len(stack.plans) for stack in self.stacks):
            cores = [self.all_cores]  # no copy: the buffer itself is sent
        for dim, group in enumerate(self.groups.sharding.values()):
            # A one-sided core stays sharded along its long side: its blocks are no terms.
            stacks = ((self.stacks[number], index) for number, index in bucket)
            terms = [stack.core[index] for stack, index in stacks if dim in stack.contracted]
            sum_over(cores if len(terms) == len(bucket) else terms, group)()
        return sum_over(cores, self.groups.replicas)

    def new_bases(self) -> list[Refresh]:
        """Decompose the gradients of the matrices that are due.

        Matrices are decomposed in rounds whose sketches fit into one bucket. Those of one round
        make the same number of power iterations.

        Returns:
            Their bases and cores, equal on all replicas; not yet applied.
        """
        due = enumerate(self.due or ())
        flat = [(number, index) for number, indices in due for index in indices]
        sizes = [self.stacks[number].sketch_size for number, _ in flat]
        rounds: dict[tuple[int, int], dict[int, list[int]]] = {}
        for bucket, members in enumerate(split_buckets(sizes, BUCKET_ELEMENTS)):
            for number, index in (flat[i] for i in members):
                key = bucket, self.stacks[number].plan.power_iterations
                rounds.setdefault(key, {}).setdefault(number, []).append(index)
        found: list[Refresh] = []
        for matrices in rounds.values():
            chosen = [(self.stacks[number], indices) for number, indices in matrices.items()]
            layouts = [stack.layout for stack, _ in chosen]
            steps = [stack.decompose(indices, self.groups) for stack, indices in chosen]
            svds: list[SVD] = solve_together(steps, layouts, self.groups)
            # One batch per matrix: a difference is repaired and logged for that matrix only. The
            # host would wait for the device if it repaired the bases here, see `repair_drift`.
            batches = [list(batch) for svd in svds for batch in zip(*svd, strict=True)]
            if self.groups.replicas is not None:
                differ = HostCopy(differences(batches, self.groups.replicas))
                self.drift.append(([(s, i) for s, indices in chosen for i in indices], differ))
            refreshes: list[Refresh] = []
            for (stack, indices), svd in zip(chosen, svds, strict=True):
                # In the new bases UᵀGV is diag(σ), and UᵀG is diag(σ)Vᵀ: nothing is sent for it.
                if stack.plan.two_sided:
                    core = torch.diag_embed(svd.values)
                    refreshes.append(Refresh(stack, indices, svd.left, svd.right, core))
                else:
                    core = svd.values[..., None] * svd.right.mT
                    refreshes.append(Refresh(stack, indices, svd.left, None, core))
            if self.settings.moments == "rotate":
                # U₊ᵀU and V₊ᵀV, summed over the shards of their rows. All matrices of a run, or
                # none, are projected on both sides.
                old = [(r, *r.stack.bases(r.indices)) for r in refreshes]
                lefts = [summed(r.left.mT @ u, "rows", False) for r, u, _ in old]
                both = [(r.right, v) for r, _, v in old if r.right is not None and v is not None]
                rights = [summed(new.mT @ v, "columns", False) for new, v in both]
                p = solve_together(lefts, layouts, self.groups)
                q = solve_together(rights, layouts, self.groups) or [None] * len(p)
                for refresh, *overlaps in zip(refreshes, p, q, strict=True):
                    refresh.overlaps = overlaps[0], overlaps[1]
            found += refreshes
        return found

    @torch.no_grad()
    def repair_drift(self) -> None:
        """Give all replicas the first one's matrices whose bases differed in the last step.

        Their weights and moments have parted since. Nothing else has: cores, dense gradients and
        the norm are sums over the replicas. So all go on as if they had used the first one's bases.
        Replicas on equal machines never differ, but one refresh with other bases would let them
        part for good. Call it after the step, when the host has read what follows those bases, on
        every rank.
        """
        drift, self.drift = self.drift, []
        for matrices, differ in drift:
            drifted = [m for m, wrong in zip(matrices, differ.read(), strict=True) if wrong]
            for stack, index in drifted:
                stacked = (stack.left, stack.right, stack.average, stack.average_square)
                state = [tensor[index] for tensor in stacked if tensor is not None]
                for tensor in (local_part(stack.parameters[index]), *state):
                    sent = tensor.contiguous()
                    dist.broadcast(sent, group_src=0, group=self.groups.replicas)
                    tensor.copy_(sent)
            if drifted:
                logger.warning(
                    "Replicas computed different bases for %s; the first replica's are used",
                    ", ".join(stack.plans[index].name for stack, index in drifted),
                )

    def norm(self, refreshes: Sequence[Refresh]) -> Tensor:
        """Return sqrt(Σ|C|² + Σ|g|²) of all cores and dense gradients, each element once, in fp64.

        Args:
            refreshes: Returned by `new_bases`; the cores of the others are already summed.

        Returns:
            A scalar, equal on all ranks.
        """
        pieces = [(self.stacks[n].core[i], self.stacks[n].core_dims) for n, i in self.projected]
        if not refreshes and not any(stack.core_dims for stack in self.stacks):
            pieces = [(self.all_cores, ())]
        pieces += [(refresh.core, refresh.stack.core_dims) for refresh in refreshes]
        pieces += [(whole_gradient(parameter), dims) for parameter, dims in self.dense]
        places = [group.rank() for group in self.groups.sharding.values()]
        own = []
        for part, dims in pieces:
            # Along the dimensions that do not shard it, all ranks hold the same part.
            if all(place == 0 or dim in dims for dim, place in enumerate(places)):
                own.append(part)
        total = torch.zeros((), dtype=torch.float64, device=self.all_cores.device)
        if own:
            total += joint_norm(own).double().square()
        for group in (*self.groups.sharding.values(), self.groups.stages):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total.sqrt()


def whole_gradient(parameter: Tensor) -> Tensor:
    """Return the local gradient for summing in place; create zeros if there is none."""
    if parameter.grad is None:
        # Other replicas may have one: every rank takes part in the sum.
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


class EarlySums:
    """The sums of one step: each starts when all its gradients are there, in a fixed order.

    Autograd may produce gradients in another order on another rank. A bucket therefore waits for
    all buckets before it.

    Args:
        buckets: The parameters of each sum.
        order: Every parameter, in the order in which backward is expected to produce gradients.
        start: Starts the sum of a bucket; returns what waits for it.
        early: Whether sums may start before all gradients are there.

    Attributes:
        started: The parameters whose sums have started: they take no other gradient.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[ParamRef]],
        order: Sequence[ParamRef],
        start: Callable[[Sequence[ParamRef]], Callable[[], None]],
        early: bool,
    ) -> None:
        position = {ref: index for index, ref in enumerate(order)}
        in_turn = sorted(buckets, key=lambda bucket: max(position[ref] for ref in bucket))
        self._waiting = [(bucket, set(bucket)) for bucket in in_turn]
        self._start, self._early = start, early
        self.started: set[ParamRef] = set()
        self._pending: list[Callable[[], None]] = []

    def ready(self, ref: ParamRef | None) -> None:
        """Mark a parameter whose gradient is complete, and start the sums that are complete.

        Args:
            ref: The parameter. None starts all sums: whatever is not marked has no gradient.
        """
        if ref is not None:
            for _, missing in self._waiting:
                missing.discard(ref)
        while self._waiting and (ref is None or (self._early and not self._waiting[0][1])):
            bucket, _ = self._waiting.pop(0)
            self.started.update(bucket)
            self._pending.append(self._start(bucket))

    def wait(self) -> None:
        """Wait for all sums that have started."""
        for wait in self._pending:
            wait()
        self._pending.clear()


def sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Start the sum of tensors of one dtype over a group, in one message.

    Returns:
        A function that waits, and copies the sums into the tensors; nothing without a group.
    """
    if group is None or not tensors:
        return lambda: None
    first = tensors[0]
    is_wire = len(tensors) == 1 and first.is_contiguous()
    wire = first if is_wire else torch.cat([tensor.reshape(-1) for tensor in tensors])
    work = dist.all_reduce(wire, group=group, async_op=True)

    def wait() -> None:
        assert work is not None
        work.wait()
        if wire is not first:
            parts = wire.split([tensor.numel() for tensor in tensors])
            views = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
            torch._foreach_copy_(list(tensors), views)

    return wait


def solve_together(
    computations: Sequence[Steps[Any]], layouts: Sequence[Layout], groups: ReductionGroups
) -> list[Any]:
    """Run computations side by side and merge each round of their requests into collectives.

    A round needs at most one call per kind of request and mesh dimension. The computations, each
    with the layout of its matrices, have the same order on all ranks.
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
        sums = {i: request for i, request in requests.items() if isinstance(request, Sum)}
        gathers = {i: request for i, request in requests.items() if isinstance(request, Gather)}
        for dim, group in enumerate(groups.sharding.values()):
            split = [s.tensor for i, s in sums.items() if dim in getattr(layouts[i], s.axis)]
            sum_over(split, group)()
        sum_over([s.tensor for s in sums.values() if s.replicas], groups.replicas)()
        answers = {i: request.tensor for i, request in sums.items()} | dict.fromkeys(gathers)
        for dim, group in enumerate(groups.sharding.values()):
            blocks = {
                i: request.tensor
                for i, request in gathers.items()
                if request.mesh_dim == dim and dim in getattr(layouts[i], request.axis)
            }
            if not blocks:
                continue
            own = torch.cat([block.reshape(-1) for block in blocks.values()])
            everyone = own.new_empty(group.size() * own.numel())
            dist.all_gather_into_tensor(everyone, own, group=group)
            sizes = [block.numel() for block in blocks.values()]
            parts = everyone.view(group.size(), -1).split(sizes, dim=1)
            for (i, block), part in zip(blocks.items(), parts, strict=True):
                answers[i] = (part.reshape(group.size(), *block.shape), group.rank())
    return results


def differences(batches: Sequence[Sequence[Tensor]], replicas: dist.ProcessGroup) -> Tensor:
    """Return whether any bit of the tensors that each replica computed itself differs.

    One all-reduce of two checksums per batch detects it.

    Returns:
        One truth value per batch (n,), the same on all replicas.
    """
    weights = torch.arange(1, CHECKED + 1, device=batches[0][0].device)
    products = torch.empty_like(weights)
    checksums = torch.stack([checksum(batch, weights, products) for batch in batches])
    extremes = torch.cat([checksums, -checksums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replicas)
    high, low = extremes.view(2, -1)
    return high != -low


def checksum(tensors: Sequence[Tensor], weights: Tensor, products: Tensor) -> Tensor:
    """Return a number in [0, 2⁶²), int64, that every bit of some tensors and its place change.

    Args:
        tensors: In fp32 or fp64.
        weights: Of the 32-bit words of a block (n,), int64.
        products: Memory (n,), int64: the tensors are cast a block at a time.
    """
    total = weights.new_zeros(())
    for tensor in tensors:
        for block in blocks(tensor, len(weights) // 2):
            bits = block.contiguous().view(-1).view(torch.int32)
            terms = products[: len(bits)].copy_(bits).mul_(weights[: len(bits)])
            # By the weights swapped entries show, by the factor swapped blocks; int64 wraps.
            total.mul_(1_000_003).add_(terms.sum())
    # Below 2⁶², the number's negative is in int64's range too.
    return total.remainder(2**62)
