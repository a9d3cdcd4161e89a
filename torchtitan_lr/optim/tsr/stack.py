# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Equal matrices of one model part with their TSR-Adam state, stacked: few kernels for many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.formulas.tsr_traffic import TSRStep, padded_block, refresh_is_dense
from torchtitan_lr.optim.tsr.adam import Bases, Hyper, adam_direction, rotate
from torchtitan_lr.optim.tsr.layout import Layout, derived, local, own_part, shard_dims
from torchtitan_lr.optim.tsr.randomized_svd import draw_sketches
from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings


@dataclass
class Refresh:
    """New bases that wait for the step to be accepted.

    Args:
        indices: The matrices of the stack that they belong to.
        bases: U (b, m, r) and V (b, n, r) or None.
        core: The core in the new bases (b, r, columns).
        overlaps: U₊ᵀU and V₊ᵀV (b, r, r), where moments are rotated.
    """

    indices: list[int]
    bases: Bases
    core: Tensor
    overlaps: tuple[Tensor, Tensor | None] | None = None


class MatrixStack:
    """b matrices of equal shape, rank and layout.

    Args:
        plans: How each is compressed.
        parameters: The parameters, plain or DTensors.
        order: Names of the run's mesh dimensions.
        settings: The settings.

    Attributes:
        left: U (b, m, r), rows split as the matrix's.
        right: V (b, n, r), rows split as the matrix's columns; None if one-sided.
        average: m (b, r, r), or (b, r, n) split as the matrix's columns if one-sided.
        average_square: v, as ``average``.
        ages: Number of cores in the moments (b,), on the CPU.
        refreshes: Number of refreshes so far (b,), on the CPU.
        cores: Sum of this rank's cores since `clear`; the optimizer gives the memory.
        pending: Refreshes of the step at hand.
    """

    def __init__(
        self,
        plans: Sequence[MatrixPlan],
        parameters: Sequence[Tensor],
        order: Sequence[str],
        settings: TSRSettings,
    ) -> None:
        self.plans, self.parameters, self.settings = list(plans), list(parameters), settings
        self.plan = plans[0]
        self.row_dim, self.column_dim = (1, 0) if self.plan.transposed else (0, 1)
        self.layout = layout_of(parameters[0], self.plan, order)
        self.core_dims = () if self.plan.two_sided else self.layout.columns
        m, n = self._oriented(local(parameters[0])).shape
        b, r = len(parameters), self.plan.rank
        weight = local(parameters[0])
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": weight.device}
        self.left = torch.zeros(b, m, r, **kind)
        self.right = torch.zeros(b, n, r, **kind) if self.plan.two_sided else None
        self.core_size = (r, r if self.plan.two_sided else n)
        self.average = torch.zeros(b, *self.core_size, **kind)
        self.average_square = torch.zeros_like(self.average)
        self.ages = torch.zeros(b, dtype=torch.int64)
        self.refreshes = torch.zeros(b, dtype=torch.int64)
        self.cores = torch.zeros_like(self.average)
        self.pending: list[Refresh] = []

    def __len__(self) -> int:
        return len(self.plans)

    def state_of(self, index: int) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of one matrix; the tensors share the stack's memory."""
        plan, parameter = self.plans[index], self.parameters[index]
        r, n = plan.rank, plan.columns
        core = (r, r) if plan.two_sided else (r, n)
        core_dims = {} if plan.two_sided else {self.column_dim: 1}
        state = {
            "left": derived(parameter, self.left[index], (plan.rows, r), {self.row_dim: 0}),
            "exp_avg": derived(parameter, self.average[index], core, core_dims),
            "exp_avg_sq": derived(parameter, self.average_square[index], core, core_dims),
            "age": self.ages[index],
            "refreshes": self.refreshes[index],
        }
        if self.right is not None:
            right = self.right[index]
            state["right"] = derived(parameter, right, (n, r), {self.column_dim: 0})
        return state

    def due(self, step: int) -> list[int]:
        """Return the matrices that refresh in a step, given the steps done before it."""
        counts = self.refreshes.tolist()
        return [i for i, plan in enumerate(self.plans) if plan.is_due(step, counts[i])]

    def gradient(self, index: int) -> Tensor:
        """Return this rank's part of a gradient (m, n); zeros where the loss gave none."""
        gradient = self.parameters[index].grad
        if gradient is None:
            return self._oriented(torch.zeros_like(local(self.parameters[index])))
        return self._oriented(local(gradient))

    def accumulate(self, index: int) -> None:
        """Add the core of a gradient, C += UᵀGV, and drop the gradient."""
        if self.parameters[index].grad is None:
            return
        gradient = self.gradient(index).to(self.dtype)
        half = self.left[index].mT @ gradient
        if self.right is None:
            self.cores[index].add_(half)
        else:
            self.cores[index].addmm_(half, self.right[index])
        self.parameters[index].grad = None

    def sketches(self, indices: Sequence[int]) -> Tensor:
        """Draw Ω for a refresh: this rank's rows (b, n, k)."""
        counts = self.refreshes.tolist()
        keys = [(self.plans[i].name, counts[i]) for i in indices]
        size = (self.plan.columns, self.plan.width)
        full = draw_sketches(keys, size, self.settings.seed, self.left)
        parameter = self.parameters[0]
        parts = [own_part(parameter, sketch, {self.column_dim: 0}) for sketch in full]
        return torch.stack(parts)

    def sends_dense(self, ranks: Sequence[int]) -> bool:
        """Return whether a refresh sums dense gradients over the replicas instead of sketches.

        Args:
            ranks: Size of every mesh dimension of the run; blocks count with their padding, so
                that all ranks decide alike.
        """
        step = TSRStep(self.settings.power_iterations, self.settings.refresh)
        return refresh_is_dense(*self._largest_block(ranks), self.plan.width, step)

    def sketch_size(self, ranks: Sequence[int]) -> int:
        """Return the elements (m + n)k of one matrix's sketches on a rank; argument as above."""
        return sum(self._largest_block(ranks)) * self.plan.width

    def clear(self) -> None:
        """Forget the cores and refreshes of a step."""
        self.cores.zero_()
        self.pending.clear()

    def commit(self) -> None:
        """Take over the new bases, carry the moments into them, and put their cores in place."""
        for refresh in self.pending:
            i = refresh.indices
            assert refresh.bases.left is not None
            self.left[i] = refresh.bases.left
            if self.right is not None and refresh.bases.right is not None:
                self.right[i] = refresh.bases.right
            if self.settings.moments == "reset":
                self.average[i] = 0
                self.average_square[i] = 0
                self.ages[i] = 0
            elif refresh.overlaps is not None:
                moments = rotate(self.average[i], self.average_square[i], *refresh.overlaps)
                self.average[i], self.average_square[i] = moments
            self.cores[i] = refresh.core
            self.refreshes[i] += 1
        self.pending.clear()

    def update(self, hyper: Hyper) -> None:
        """Make the step: Adam in core space, then W ← (1 − ηλ)W − ηα·UDVᵀ."""
        self.average.lerp_(self.cores, 1 - hyper.beta1)
        self.average_square.mul_(hyper.beta2).addcmul_(
            self.cores, self.cores, value=1 - hyper.beta2
        )
        self.ages += 1
        directions = adam_direction(self.average, self.average_square, self._age(), hyper)
        shrink, rate = 1 - hyper.lr * hyper.weight_decay, -hyper.lr * hyper.scale
        for i, parameter in enumerate(self.parameters):
            weight = self._oriented(local(parameter))
            if self.right is None:
                factors = self.left[i], directions[i]
            else:
                factors = self.left[i] @ directions[i], self.right[i].mT
            if weight.dtype == self.dtype:
                weight.addmm_(*factors, beta=shrink, alpha=rate)
            else:
                exact = torch.addmm(weight.to(self.dtype), *factors, beta=shrink, alpha=rate)
                weight.copy_(exact)

    def _age(self) -> float | Tensor:
        first, *others = ages = self.ages.tolist()
        if all(age == first for age in others):
            return float(first)
        return torch.tensor(ages, dtype=self.dtype, device=self.left.device)[:, None, None]

    def _largest_block(self, ranks: Sequence[int]) -> tuple[int, int]:
        rows = padded_block(self.plan.rows, (ranks[dim] for dim in self.layout.rows))
        return rows, padded_block(self.plan.columns, (ranks[d] for d in self.layout.columns))

    def _oriented(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.plan.transposed else matrix


def layout_of(parameter: Tensor, plan: MatrixPlan, order: Sequence[str]) -> Layout:
    """Return which mesh dimensions split the rows and the columns of a planned matrix."""
    row_dim, column_dim = (1, 0) if plan.transposed else (0, 1)
    return Layout(shard_dims(parameter, row_dim, order), shard_dims(parameter, column_dim, order))
