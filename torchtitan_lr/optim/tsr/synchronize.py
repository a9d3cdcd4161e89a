# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Communication of a TSR-Adam step: sum cores and dense gradients, compute new bases.

The optimizer reduces over the replicate dimension: FSDP sums gradients over the shards only.
`tsr_adam_step` calls these operations in the order of a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchtitan.tools.logging import logger

from torchtitan_lr.compat.dtensor import local_part
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

Matrix = tuple[int, int]
"""Number of a stack, and index of the matrix in it."""

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
    ) -> None:
        self.stacks, self.dense, self.groups, self.settings = stacks, dense, groups, settings
        sizes = [stack.average.numel() for stack in stacks]
        # A pipeline stage may have no compressed matrix.
        like = stacks[0].average if stacks else local_part(dense[0][0])
        self.all_cores = like.new_zeros(sum(sizes))
        parts = self.all_cores.split(sizes)
        self.cores = [p.view(s.average.shape) for s, p in zip(stacks, parts, strict=True)]

    def zero_cores(self) -> list[Tensor]:
        """Zero the cores for a new step and return them by stack; the memory is reused."""
        self.all_cores.zero_()
        return self.cores

    def core_buckets(self, due: Due) -> list[list[Matrix]]:
        """Split the matrices that keep their bases into about ``tsr_overlap_buckets`` buckets."""
        plain = self._plain(due)
        sizes = [self.cores[stack][0].numel() for stack, _ in plain]
        limit = -(-sum(sizes) // self.settings.overlap_buckets)
        return [[plain[i] for i in bucket] for bucket in split_buckets(sizes, limit)]

    def start_core_sum(self, bucket: Sequence[Matrix]) -> list[PendingSum]:
        """Sum cores over the shards, and start their sum over the replicas, if any."""
        dtype = torch.bfloat16 if self.settings.core_dtype == "bfloat16" else None
        for dim, group in enumerate(self.groups.shards):
            # A one-sided core stays sharded along its long side.
            split = []
            for number, index in bucket:
                stack = self.stacks[number]
                splits = (*stack.layout.rows, *stack.layout.columns)
                if dim in splits and dim not in stack.core_dims:
                    split.append((number, index))
            sum_over(self._core_tensors(split), group, dtype)
        if self.groups.replicas is None:
            return []
        return [PendingSum(self._core_tensors(bucket), self.groups.replicas, dtype)]

    def sum_gradients(self, due: Due) -> list[Tensor]:
        """Sum dense gradients over the replicas, in place.

        Args:
            due: The matrices that refresh; those with a dense refresh are summed here too.

        Returns:
            The gradient of every dense parameter, in order: this rank's parts.
        """
        dense = [_whole_gradient(parameter) for parameter, _ in self.dense]
        refreshing = [
            _whole_gradient(self.stacks[job.stack].parameters[index])
            for job in self._jobs(due)
            if job.dense
            for index in job.indices
        ]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in dense + refreshing:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same in by_dtype.values():
            sizes = [gradient.numel() for gradient in same]
            for bucket in split_buckets(sizes, BUCKET_ELEMENTS):
                sum_over([same[i] for i in bucket], self.groups.replicas)
        return dense

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

    def _plain(self, due: Due) -> list[Matrix]:
        """Return the matrices that keep their bases in this step."""
        return [
            (number, index)
            for number, stack in enumerate(self.stacks)
            for index in range(len(stack))
            if index not in due[number]
        ]

    def _core_tensors(self, matrices: Sequence[Matrix]) -> list[Tensor]:
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
        """Split the matrices that refresh into rounds whose sketches fit into one bucket."""
        flat = [(job, index) for job in self._jobs(due) for index in job.indices]
        sizes = [self.stacks[job.stack].sketch_size(self.groups.sizes) for job, _ in flat]
        rounds = []
        for bucket in split_buckets(sizes, BUCKET_ELEMENTS):
            jobs: dict[int, Job] = {}
            for job, index in (flat[i] for i in bucket):
                jobs.setdefault(job.stack, job._replace(indices=[])).indices.append(index)
            rounds.append(list(jobs.values()))
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
            self.settings.power_iterations,
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
