# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Matrices of one shape with their TSR-Adam state, stacked to need fewer kernels."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.tsr.layout import Layout, derived, own_part, shard_dims
from torchtitan_lr.optim.tsr.randomized_svd import draw_basis, draw_sketches
from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings
from torchtitan_lr.optim.tsr.sizes import largest_block, refresh_is_dense


@dataclass
class Refresh:
    """New bases that are applied when the step is accepted.

    Args:
        stack: Number of the stack.
        indices: The matrices of the stack to which they belong.
        left: U (b, m, r).
        right: V (b, n, r), or None if that side is not projected.
        core: The core in the new bases (b, r, columns).
        overlaps: U₊ᵀU and V₊ᵀV (b, r, r), if moments are rotated.
    """

    stack: int
    indices: list[int]
    left: Tensor
    right: Tensor | None
    core: Tensor
    overlaps: tuple[Tensor, Tensor | None] | None = None


class MatrixStack:
    """b matrices of equal shape, rank and layout.

    Args:
        plans: The compression of each matrix.
        parameters: The parameters, plain or DTensors.
        order: Names of the run's mesh dimensions.
        settings: The settings.

    Attributes:
        left: U (b, m, r), rows sharded like the matrix's rows.
        right: V (b, n, r), rows sharded like the matrix's columns; None if one-sided.
        average: m (b, r, r), or (b, r, n) sharded like the matrix's columns if one-sided.
        average_square: v, of the same shape as ``average``.
        ages: Number of cores in the moments (b,), on the CPU.
        refreshes: Number of refreshes so far (b,), on the CPU.
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
        m, n = self._oriented(local_part(parameters[0])).shape
        b, r = len(parameters), self.plan.rank
        weight = local_part(parameters[0])
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": weight.device}
        self.left = torch.zeros(b, m, r, **kind)
        self.right = torch.zeros(b, n, r, **kind) if self.plan.two_sided else None
        self.core_size = (r, r if self.plan.two_sided else n)
        self.average = torch.zeros(b, *self.core_size, **kind)
        self.average_square = torch.zeros_like(self.average)
        self.ages = torch.zeros(b, dtype=torch.int64)
        self.refreshes = torch.zeros(b, dtype=torch.int64)
        if self.plan.waits:
            self._draw_bases()

    def __len__(self) -> int:
        return len(self.plans)

    def state_of(self, index: int) -> dict[str, Tensor]:
        """Return the checkpointed state of one matrix; the tensors share the stack's memory."""
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
        """Return this rank's part of a gradient (m, n), or zeros if there is none."""
        gradient = self.parameters[index].grad
        if gradient is None:
            return self._oriented(torch.zeros_like(local_part(self.parameters[index])))
        return self._oriented(local_part(gradient))

    def has_gradient(self, index: int) -> bool:
        """Return whether backward produced a gradient for a matrix."""
        return self.parameters[index].grad is not None

    def take_gradient(self, index: int) -> Tensor:
        """Return this rank's part of a gradient (m, n) in the bases' dtype, and free it."""
        gradient = self.gradient(index).to(self.dtype)
        self.parameters[index].grad = None
        return gradient

    def weight(self, index: int) -> Tensor:
        """Return this rank's part of a weight (m, n); a view."""
        return self._oriented(local_part(self.parameters[index]))

    def bases(self, index: int | list[int]) -> tuple[Tensor, Tensor | None]:
        """Return U and V: views for one matrix, stacked copies for a list of matrices."""
        return self.left[index], None if self.right is None else self.right[index]

    def age(self) -> float | Tensor:
        """Return the number of cores in the moments: a float, or (b, 1, 1) if matrices differ."""
        first, *others = ages = self.ages.tolist()
        if all(age == first for age in others):
            return float(first)
        return torch.tensor(ages, dtype=self.dtype, device=self.left.device)[:, None, None]

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
        """Return whether a refresh sums dense gradients, not sketches, over the replicas.

        Args:
            ranks: Size of every mesh dimension of the run. Blocks are counted with padding, so that
                the result is equal on all ranks.
        """
        return refresh_is_dense(
            *self._largest_block(ranks),
            self.plan.width,
            self.plan.power_iterations,
            self.settings.refresh,
        )

    def sketch_size(self, ranks: Sequence[int]) -> int:
        """Return the elements (m + n)k of one matrix's sketches on a rank."""
        return sum(self._largest_block(ranks)) * self.plan.width

    def _largest_block(self, ranks: Sequence[int]) -> tuple[int, int]:
        rows = largest_block(self.plan.rows, (ranks[dim] for dim in self.layout.rows))
        return rows, largest_block(self.plan.columns, (ranks[d] for d in self.layout.columns))

    def _draw_bases(self) -> None:
        """Set the bases that are used until the first refresh; each rank draws its own rows."""
        sides = [("left", self.left, self.plan.rows, self.row_dim)]
        if self.right is not None:
            sides.append(("right", self.right, self.plan.columns, self.column_dim))
        for side, bases, rows, dim in sides:
            for plan, parameter, basis in zip(self.plans, self.parameters, bases, strict=True):
                key = f"{self.settings.seed}:{plan.name}:{side}"
                full = draw_basis(key, (rows, plan.rank))
                basis.copy_(own_part(parameter, full, {dim: 0}))

    def _oriented(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.plan.transposed else matrix


def layout_of(parameter: Tensor, plan: MatrixPlan, order: Sequence[str]) -> Layout:
    """Return which mesh dimensions split the rows and the columns of a planned matrix."""
    row_dim, column_dim = (1, 0) if plan.transposed else (0, 1)
    return Layout(shard_dims(parameter, row_dim, order), shard_dims(parameter, column_dim, order))


def build_stacks(
    matrices: Sequence[tuple[MatrixPlan, Tensor]], order: Sequence[str], settings: TSRSettings
) -> list[MatrixStack]:
    """Stack the matrices that have the same shape, rank and layout."""
    alike: dict[Any, list[tuple[MatrixPlan, Tensor]]] = defaultdict(list)
    for plan, parameter in matrices:
        shape = (plan.rows, plan.columns, plan.rank, plan.power_iterations, plan.transposed)
        layout = layout_of(parameter, plan, order)
        key = (shape, layout, local_part(parameter).shape, parameter.dtype)
        alike[key].append((plan, parameter))
    return [
        MatrixStack([plan for plan, _ in same], [p for _, p in same], order, settings)
        for same in alike.values()
    ]
