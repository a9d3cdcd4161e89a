# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""From this rank's gradients to what all replicas agree on: cores, dense gradients, new bases.

The optimizer owns the replicate dimension: gradients arrive summed over the shards at most. A
step is `accumulate` after every micro-batch, then `synchronize`, `clip`, and the optimizers' own.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torchtitan.tools.logging import logger

from torchtitan_lr.formulas.tsr_traffic import split_buckets
from torchtitan_lr.optim.tsr.adam import Bases, new_bases
from torchtitan_lr.optim.tsr.layout import local
from torchtitan_lr.optim.tsr.mesh_sync import (
    PendingSum,
    Ranks,
    repair_drift,
    solve_together,
    squared_norm,
    sum_over,
)
from torchtitan_lr.optim.tsr.randomized_svd import SVD, SketchSettings, Steps, Sum, randomized_svd
from torchtitan_lr.optim.tsr.selection import TSRSettings
from torchtitan_lr.optim.tsr.stack import MatrixStack, Refresh

Matrix = tuple[MatrixStack, int]


class Synchronizer:
    """Carries out the communication of a step for all model parts of a rank.

    Args:
        stacks: The compressed matrices of all parts.
        dense: The other parameters, each with the sharding dimensions that split it.
        ranks: The process groups.
        settings: The settings.

    Attributes:
        gradients: After `synchronize`, the summed gradient of every dense parameter, in order.
    """

    def __init__(
        self,
        stacks: Sequence[MatrixStack],
        dense: Sequence[tuple[Tensor, tuple[int, ...]]],
        ranks: Ranks,
        settings: TSRSettings,
    ) -> None:
        self.stacks, self.dense, self.ranks, self.settings = stacks, dense, ranks, settings
        self.gradients: list[Tensor] = []
        self._share_memory()
        self._refreshing: list[tuple[MatrixStack, list[int]]] = []
        self._sums: list[PendingSum] = []
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """Forget the last step's gradients and plan this one's refreshes.

        Args:
            step: Steps done so far.
        """
        self._step = step
        self.gradients = []
        self._sums = []
        for stack in self.stacks:
            stack.clear()
        due = [(stack, stack.due(step)) for stack in self.stacks]
        self._refreshing = [(stack, indices) for stack, indices in due if indices]

    @property
    def is_begun(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def accumulate(self, last: bool) -> None:
        """Project the gradients of one micro-batch and drop them; those that refresh stay.

        Args:
            last: Whether no micro-batch follows. Then each bucket of cores sets out as soon as it
                is projected.
        """
        for bucket in self._core_buckets():
            for stack, index in bucket:
                stack.accumulate(index)
            if last and bucket:
                self._send_cores(bucket)

    def synchronize(self) -> Tensor:
        """Finish all sums over the replicas and find the new bases.

        Returns:
            The norm of everything that the update uses, sqrt(Σ|C|² + Σ|g|²), equal on all ranks.
        """
        for pending in self._sums:
            pending.wait()
        self._sums = []
        refreshing = [(s, i, s.sends_dense(self.ranks.sizes)) for s, i in self._refreshing]
        self._sum_dense([(s, i) for s, indices, dense in refreshing if dense for i in indices])
        for jobs in self._rounds(refreshing):
            self._refresh(jobs)
        return self._norm()

    def clip(self, factor: Tensor) -> None:
        """Scale cores and dense gradients by a factor of at most 1."""
        cores = [refresh.core for stack in self.stacks for refresh in stack.pending]
        tensors = [self._cores, *cores, *self.gradients]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, same in by_dtype.items():
            torch._foreach_mul_(same, factor.to(dtype))

    def end(self) -> None:
        """The step is done or given up."""
        self._step = None
        self.gradients = []
        for stack in self.stacks:
            stack.pending.clear()

    def nonfinite(self) -> str | None:
        """Name the first matrix whose core on this rank is not finite."""
        for stack in self.stacks:
            for plan, core in zip(stack.plans, stack.cores, strict=True):
                if not torch.isfinite(core).all():
                    return plan.name
        return None

    def _share_memory(self) -> None:
        """Put all cores into one buffer: clearing, scaling and sending them is one call."""
        sizes = [stack.cores.numel() for stack in self.stacks]
        # A pipeline stage may hold no matrix at all.
        like = self.stacks[0].cores if self.stacks else local(self.dense[0][0])
        self._cores = like.new_zeros(sum(sizes))
        for stack, part in zip(self.stacks, self._cores.split(sizes), strict=True):
            stack.cores = part.view(stack.cores.shape)

    def _plain(self) -> list[Matrix]:
        """The matrices that keep their bases in this step."""
        due = {id(stack): set(indices) for stack, indices in self._refreshing}
        return [
            (stack, index)
            for stack in self.stacks
            for index in range(len(stack))
            if index not in due.get(id(stack), ())
        ]

    def _core_buckets(self) -> list[list[Matrix]]:
        plain = self._plain()
        sizes = [stack.cores[0].numel() for stack, _ in plain]
        limit = -(-sum(sizes) // self.settings.overlap_buckets)
        return [[plain[i] for i in bucket] for bucket in split_buckets(sizes, limit)]

    def _send_cores(self, bucket: Sequence[Matrix]) -> None:
        dtype = torch.bfloat16 if self.settings.core_dtype == "bfloat16" else None
        for dim, group in enumerate(self.ranks.groups):
            # A one-sided core stays split along its long side.
            split = [
                (stack, index)
                for stack, index in bucket
                if dim in (*stack.layout.rows, *stack.layout.columns) and dim not in stack.core_dims
            ]
            sum_over(self._core_tensors(split), group, dtype)
        if self.ranks.replicas is not None:
            tensors = self._core_tensors(bucket)
            self._sums.append(PendingSum(tensors, self.ranks.replicas, dtype))

    def _core_tensors(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        if len(matrices) == sum(len(stack) for stack in self.stacks):
            return [self._cores]  # all of them: sent where they lie
        return [stack.cores[index] for stack, index in matrices]

    def _sum_dense(self, refreshing: Iterable[Matrix]) -> None:
        """Sum gradients that travel whole over the replicas."""
        gradients = []
        for parameter, _ in self.dense:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local(parameter.grad))
        self.gradients = gradients
        whole = gradients + [_gradient_of(stack, index) for stack, index in refreshing]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in whole:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same in by_dtype.values():
            for bucket in split_buckets([gradient.numel() for gradient in same]):
                sum_over([same[i] for i in bucket], self.ranks.replicas)

    def _rounds(
        self, refreshing: Sequence[tuple[MatrixStack, list[int], bool]]
    ) -> list[list[tuple[MatrixStack, list[int], bool]]]:
        """Split the refreshing matrices into rounds whose sketches fit into a bucket."""
        flat = [(s, i, dense) for s, indices, dense in refreshing for i in indices]
        sizes = [s.sketch_size(self.ranks.sizes) for s, _, _ in flat]
        rounds = []
        for bucket in split_buckets(sizes):
            jobs: dict[int, tuple[MatrixStack, list[int], bool]] = {}
            for stack, index, dense in (flat[i] for i in bucket):
                jobs.setdefault(id(stack), (stack, [], dense))[1].append(index)
            rounds.append(list(jobs.values()))
        return rounds

    def _refresh(self, jobs: Sequence[tuple[MatrixStack, list[int], bool]]) -> None:
        """Find the new bases of some matrices."""
        layouts = [stack.layout for stack, _, _ in jobs]
        decompositions = [self._decompose(*job) for job in jobs]
        svds = solve_together(decompositions, layouts, self.ranks)
        self._check_replicas(jobs, svds)
        refreshes = []
        for (stack, indices, _), svd in zip(jobs, svds, strict=True):
            bases, core = new_bases(svd, stack.plan.two_sided)
            refreshes.append(Refresh(indices, bases, core))
            stack.pending.append(refreshes[-1])
        if self.settings.moments == "rotate":
            steps = [
                _overlaps(refresh.bases, *_bases_of(stack, indices))
                for (stack, indices, _), refresh in zip(jobs, refreshes, strict=True)
            ]
            for refresh, found in zip(
                refreshes, solve_together(steps, layouts, self.ranks), strict=True
            ):
                refresh.overlaps = found

    def _decompose(self, stack: MatrixStack, indices: list[int], dense: bool) -> Steps[SVD]:
        settings = SketchSettings(
            stack.plan.rank,
            stack.plan.width,
            self.settings.power_iterations,
            mesh_dims=len(self.ranks.sharding),
            replicas=self.ranks.replicas is not None and not dense,
        )
        gradients = [stack.gradient(index) for index in indices]
        sketches = stack.sketches(indices)
        return randomized_svd(gradients, sketches, settings, _bases_of(stack, indices))

    def _check_replicas(
        self, jobs: Sequence[tuple[MatrixStack, list[int], bool]], svds: Sequence[SVD]
    ) -> None:
        # Batches by matrix: a difference is repaired, and told, for that matrix alone.
        names = [stack.plans[index].name for stack, indices, _ in jobs for index in indices]
        batches = [
            [svd.left[i], svd.values[i], svd.right[i]]
            for svd in svds
            for i in range(svd.values.shape[0])
        ]
        drifted = repair_drift(batches, self.ranks.replicas)
        if drifted:
            logger.warning(
                "Replicas found other bases for %s; the first replica's are used",
                ", ".join(names[i] for i in drifted),
            )

    def _norm(self) -> Tensor:
        plain = [(stack.cores[index], stack.core_dims) for stack, index in self._plain()]
        if not self._refreshing and not any(stack.core_dims for stack in self.stacks):
            plain = [(self._cores, ())]
        refreshed = [
            (refresh.core, stack.core_dims) for stack in self.stacks for refresh in stack.pending
        ]
        dims = [dims for _, dims in self.dense]
        dense = list(zip(self.gradients, dims, strict=True))
        total = squared_norm([*plain, *refreshed, *dense], self.ranks, self._cores.device)
        return total.sqrt()


def _overlaps(
    new: Bases, old_left: Tensor, old_right: Tensor | None
) -> Steps[tuple[Tensor, Tensor | None]]:
    """Compute U₊ᵀU and V₊ᵀV, whose rows are spread over ranks."""
    assert new.left is not None
    left = yield Sum(new.left.mT @ old_left, "rows", replicas=False)
    assert isinstance(left, Tensor)
    if new.right is None or old_right is None:
        return left, None
    right = yield Sum(new.right.mT @ old_right, "columns", replicas=False)
    assert isinstance(right, Tensor)
    return left, right


def _bases_of(stack: MatrixStack, indices: list[int]) -> tuple[Tensor, Tensor | None]:
    """Copies of the bases that some matrices of a stack have until the step is accepted."""
    return stack.left[indices], None if stack.right is None else stack.right[indices]


def _gradient_of(stack: MatrixStack, index: int) -> Tensor:
    """The gradient as it lies in memory; created where there is none, to be summed in place."""
    parameter = stack.parameters[index]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
