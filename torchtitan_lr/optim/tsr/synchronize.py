# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Communication of a TSR-Adam step: sum cores and dense gradients, compute new bases.

The optimizer reduces over the replicate dimension: FSDP sums gradients over the shards only.
`tsr_adam_step` calls these operations in the order of a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.tsr.early_sums import DENSE, EarlySums, Place
from torchtitan_lr.optim.tsr.mesh_sync import (
    PendingSum,
    ReductionGroups,
    repair_drift,
    solve_together,
    squared_norm,
    sum_over,
)
from torchtitan_lr.optim.tsr.randomized_svd import SVD, SketchSettings, Steps, Sum, randomized_svd
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.optim.tsr.sizes import BUCKET_ELEMENTS, split_buckets
from torchtitan_lr.optim.tsr.stack import MatrixStack, Refresh
from torchtitan_lr.titan import logger

Due = Sequence[Sequence[int]]
"""The matrices that refresh in this step, by stack."""


class Job(NamedTuple):
    """Matrices of one stack that are decomposed in the same round.

    Attributes:
        stack: Number of the stack.
        indices: The matrices.
        dense: Whether their gradients are already summed over the replicas.
    """

    stack: int
    indices: list[int]
    dense: bool


class Synchronizer:
    """The communication of a step for all model parts of a rank.

    Args:
        stacks: The compressed matrices of all parts.
        dense: The other parameters, each with the mesh dimensions that shard it.
        groups: The process groups.
        settings: The settings.
        order: All parameters in the order in which backward is expected to produce gradients.

    Attributes:
        all_cores: All cores of a step in one buffer, which one call clears, scales or sends.
        cores: Views of it by stack (b, r, r), or (b, r, n) if one-sided.
    """

    def __init__(
        self,
        stacks: Sequence[MatrixStack],
        dense: Sequence[tuple[Tensor, tuple[int, ...]]],
        groups: ReductionGroups,
        settings: TSRSettings,
        order: Sequence[Place],
    ) -> None:
        self.stacks, self.dense, self.groups, self.settings = stacks, dense, groups, settings
        self.order = order
        self._projected: set[Place] = set()
        self._sums: EarlySums | None = None
        sizes = [stack.average.numel() for stack in stacks]
        # A pipeline stage may have no compressed matrix.
        like = stacks[0].average if stacks else local_part(dense[0][0])
        self.all_cores = like.new_zeros(sum(sizes))
        parts = self.all_cores.split(sizes)
        self.cores = [p.view(s.average.shape) for s, p in zip(stacks, parts, strict=True)]

    def due(self, steps_done: int) -> Due:
        """Return the matrices that refresh in the step after ``steps_done`` steps."""
        return [stack.due(steps_done) for stack in self.stacks]

    def begin(self, due: Due) -> list[Tensor]:
        """Zero the cores for a new step and plan its sums; the memory is reused."""
        self.drop()
        self.all_cores.zero_()
        self._projected = set(self._plain(due))
        # A pipeline runs backward several times before a gradient is complete.
        early = self.groups.stages is None and self.settings.overlap_buckets > 1
        plain = [place for place in self.order if place in self._projected]
        cores = self._split(plain, [self.cores[stack][0].numel() for stack, _ in plain])
        buckets = [*cores, *self._dense_buckets(due)]
        self._sums = EarlySums(buckets, self.order, self._start_sum, early)
        return self.cores

    def drop(self) -> None:
        """Wait for what an abandoned step has started."""
        if self._sums is not None:
            self._sums.wait()

    def abandon(self) -> None:
        """As `drop`, for sums of which some have failed."""
        if self._sums is not None:
            self._sums.abandon()

    def receive(self, place: Place) -> None:
        """Note a gradient that backward has produced.

        FSDP's gradients of one unit share their memory. A small one that is kept is copied, so that
        it does not keep the large ones alive.

        Raises:
            RuntimeError: The sum that it belongs to has already started.
        """
        assert self._sums is not None
        if self._sums.has_started(place) and self._parameter(place).grad is not None:
            raise RuntimeError(
                "a parameter received a second gradient after its sum over the replicas had "
                "started; set optimizer.tsr_overlap_buckets = 1"
            )
        if place[0] == DENSE:
            _leave_shared_memory(self._parameter(place))

    def is_projected(self, place: Place) -> bool:
        """Return whether a parameter has a gradient that is now to be projected and freed."""
        number, index = place
        return place in self._projected and self.stacks[number].has_gradient(index)

    def ready(self, place: Place) -> None:
        """Mark a parameter that has its last gradient, and start the sums that are complete."""
        assert self._sums is not None
        self._sums.ready(place)

    def start_rest(self) -> None:
        """Start the sums that have not started."""
        assert self._sums is not None
        self._sums.start_rest()

    def finish_sums(self) -> list[Tensor]:
        """Wait for all sums.

        Returns:
            The gradient of every dense parameter, in order: this rank's parts.
        """
        assert self._sums is not None
        self._sums.wait()
        return [_whole_gradient(parameter) for parameter, _ in self.dense]

    def new_bases(self, due: Due) -> list[Refresh]:
        """Decompose the gradients of the matrices that are due.

        Returns:
            Their bases and cores, equal on all replicas; not yet applied.
        """
        return [refresh for jobs in self._rounds(due) for refresh in self._decompose_all(jobs)]

    def norm(self, due: Due, refreshes: Sequence[Refresh], gradients: Sequence[Tensor]) -> Tensor:
        """Return sqrt(Σ|C|² + Σ|g|²) of all cores and dense gradients, equal on all ranks.

        Args:
            due: The matrices that refresh; the cores of the others are already summed.
            refreshes: Returned by `new_bases`.
            gradients: Returned by `sum_gradients`.
        """
        plain = [(self.cores[s][i], self.stacks[s].core_dims) for s, i in self._plain(due)]
        if not any(due) and not any(stack.core_dims for stack in self.stacks):
            plain = [(self.all_cores, ())]
        refreshed = [(r.core, self.stacks[r.stack].core_dims) for r in refreshes]
        dims = [dims for _, dims in self.dense]
        dense = list(zip(gradients, dims, strict=True))
        pieces = [*plain, *refreshed, *dense]
        return squared_norm(pieces, self.groups, self.all_cores.device).sqrt()

    def nonfinite(self) -> str | None:
        """Return the first matrix whose core on this rank is not finite, or None."""
        for stack, cores in zip(self.stacks, self.cores, strict=True):
            for plan, core in zip(stack.plans, cores, strict=True):
                if not torch.isfinite(core).all():
                    return plan.name
        return None

    def _dense_buckets(self, due: Due) -> list[list[Place]]:
        """Split the dense parameters, and the matrices with a dense refresh, by dtype and size."""
        places = [place for place in self.order if place[0] == DENSE]
        places += [(job.stack, i) for job in self._jobs(due) if job.dense for i in job.indices]
        by_dtype: dict[torch.dtype, list[Place]] = {}
        for place in places:
            by_dtype.setdefault(self._parameter(place).dtype, []).append(place)
        buckets = []
        for same in by_dtype.values():
            sizes = [local_part(self._parameter(place)).numel() for place in same]
            buckets += self._split(same, sizes, BUCKET_ELEMENTS)
        return buckets

    def _split(
        self, places: Sequence[Place], sizes: Sequence[int], most: int | None = None
    ) -> list[list[Place]]:
        limit = -(-sum(sizes) // self.settings.overlap_buckets)
        limit = limit if most is None else min(limit, most)
        return [[places[i] for i in bucket] for bucket in split_buckets(sizes, limit)]

    def _start_sum(self, bucket: Sequence[Place]) -> list[PendingSum]:
        if bucket[0] in self._projected:
            return self._start_core_sum(bucket)
        gradients = [_whole_gradient(self._parameter(place)) for place in bucket]
        if self.groups.replicas is None:
            return []
        return [PendingSum(gradients, self.groups.replicas)]

    def _start_core_sum(self, bucket: Sequence[Place]) -> list[PendingSum]:
        """Sum cores over the shards, and start their sum over the replicas, if any."""
        for dim, group in enumerate(self.groups.shards):
            # A one-sided core stays sharded along its long side.
            split = []
            for number, index in bucket:
                stack = self.stacks[number]
                splits = (*stack.layout.rows, *stack.layout.columns)
                if dim in splits and dim not in stack.core_dims:
                    split.append((number, index))
            sum_over(self._core_tensors(split), group)
        if self.groups.replicas is None:
            return []
        return [PendingSum(self._core_tensors(bucket), self.groups.replicas)]

    def _plain(self, due: Due) -> list[Place]:
        """Return the matrices that keep their bases in this step."""
        return [
            (number, index)
            for number, stack in enumerate(self.stacks)
            for index in range(len(stack))
            if index not in due[number]
        ]

    def _parameter(self, place: Place) -> Tensor:
        number, index = place
        return self.dense[index][0] if number == DENSE else self.stacks[number].parameters[index]

    def _core_tensors(self, matrices: Sequence[Place]) -> list[Tensor]:
        if len(matrices) == sum(len(stack) for stack in self.stacks):
            return [self.all_cores]  # no copy: the buffer itself is sent
        return [self.cores[number][index] for number, index in matrices]

    def _jobs(self, due: Due) -> list[Job]:
        return [
            Job(number, list(indices), self.stacks[number].sends_dense(self.groups.sizes))
            for number, indices in enumerate(due)
            if indices
        ]

    def _rounds(self, due: Due) -> list[list[Job]]:
        """Split the matrices that refresh into rounds whose sketches fit into one bucket.

        Matrices of one round make the same number of power iterations.
        """
        flat = [(job, index) for job in self._jobs(due) for index in job.indices]
        sizes = [self.stacks[job.stack].sketch_size(self.groups.sizes) for job, _ in flat]
        rounds: list[list[Job]] = []
        for bucket in split_buckets(sizes, BUCKET_ELEMENTS):
            jobs: dict[int, Job] = {}
            for job, index in (flat[i] for i in bucket):
                jobs.setdefault(job.stack, job._replace(indices=[])).indices.append(index)
            by_q: dict[int, list[Job]] = {}
            for job in jobs.values():
                q = self.stacks[job.stack].plan.power_iterations
                by_q.setdefault(q, []).append(job)
            rounds += by_q.values()
        return rounds

    def _decompose_all(self, jobs: Sequence[Job]) -> list[Refresh]:
        """Compute the new bases of one round."""
        stacks = [self.stacks[job.stack] for job in jobs]
        layouts = [stack.layout for stack in stacks]
        svds = solve_together([self._decompose(job) for job in jobs], layouts, self.groups)
        self._check_replicas(jobs, svds)
        refreshes = [
            Refresh(job.stack, job.indices, *bases_and_core(svd, stack.plan.two_sided))
            for job, stack, svd in zip(jobs, stacks, svds, strict=True)
        ]
        if self.settings.moments == "rotate":
            steps = [
                _overlaps(refresh, *stack.bases(refresh.indices))
                for refresh, stack in zip(refreshes, stacks, strict=True)
            ]
            overlaps = solve_together(steps, layouts, self.groups)
            for refresh, found in zip(refreshes, overlaps, strict=True):
                refresh.overlaps = found
        return refreshes

    def _decompose(self, job: Job) -> Steps[SVD]:
        stack = self.stacks[job.stack]
        settings = SketchSettings(
            stack.plan.rank,
            stack.plan.width,
            stack.plan.power_iterations,
            mesh_dims=len(self.groups.sharding),
            replicas=self.groups.replicas is not None and not job.dense,
        )
        gradients = [stack.gradient(index) for index in job.indices]
        sketches = stack.sketches(job.indices)
        return randomized_svd(gradients, sketches, settings, stack.bases(job.indices))

    def _check_replicas(self, jobs: Sequence[Job], svds: Sequence[SVD]) -> None:
        # One batch per matrix: a difference is repaired and logged for that matrix only.
        names = [self.stacks[job.stack].plans[i].name for job in jobs for i in job.indices]
        batches = [
            [svd.left[i], svd.values[i], svd.right[i]]
            for svd in svds
            for i in range(svd.values.shape[0])
        ]
        drifted = repair_drift(batches, self.groups.replicas)
        if drifted:
            logger.warning(
                "Replicas computed different bases for %s; the first replica's are used",
                ", ".join(names[i] for i in drifted),
            )


def bases_and_core(svd: SVD, two_sided: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return bases and core from a decomposition.

    Args:
        svd: U, σ, V of the gradient.
        two_sided: Whether both sides are projected, or only the rows (U).

    Returns:
        U, V or None, and the core UᵀGV = diag(σ), or UᵀG = diag(σ)Vᵀ, which needs no communication.
    """
    if two_sided:
        return svd.left, svd.right, torch.diag_embed(svd.values)
    return svd.left, None, svd.values[..., None] * svd.right.mT


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


def _leave_shared_memory(parameter: Tensor) -> None:
    """Copy a gradient that is a small part of a buffer which other gradients share."""
    gradient = parameter.grad
    if gradient is None:
        return
    part = local_part(gradient)
    if part.untyped_storage().nbytes() > 2 * part.nbytes:
        parameter.grad = gradient.clone()
