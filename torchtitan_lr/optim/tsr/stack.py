# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Algorithm 1's equations, on matrices that are alike."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part, own_part, shard_dims, wrap_like
from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings
from torchtitan_lr.optim.tsr.sums import Groups, Layout
from torchtitan_lr.optim.tsr.svd import Batch, draw_basis, draw_sketches


@dataclass
class NewBases:
    """New bases of b matrices of one stack."""

    stack: "MatrixStack"
    indices: list[int]
    """The matrices' places in it."""
    U: Tensor
    """(b, m, r)."""
    V: Tensor | None
    """(b, n, r), or None if that side is not projected."""
    C: Tensor
    """The core in the new bases, (b, r, r) or (b, r, n)."""
    U_overlap: Tensor | None = None
    """U₊ᵀU (b, r, r), the old basis in the new one; None unless moments are rotated."""
    V_overlap: Tensor | None = None
    """V₊ᵀV (b, r, r), likewise."""


class MatrixStack:
    """Algorithm 1's equations, on b matrices of equal shape, rank and layout.

    Stacked matrices need fewer kernels. Every tensor here is this rank's part; ``ranks`` has the
    size of every mesh dimension of the run.

    Attributes:
        plan: What the matrices have in common: shape, rank and power iterations.
        U: (b, m, r), rows sharded like the matrix's rows.
        V: (b, n, r), rows sharded like the matrix's columns; None if one-sided.
        C: The cores of the running step (b, r, r), or (b, r, n), sharded like the matrix's columns,
            if one-sided. `TSRAdam` provides the memory.
        exp_avg: Adam's m, of the same shape as C.
        exp_avg_sq: Adam's v, likewise.
        row_dim: Dimension of a parameter that its rows are, as it is projected.
        column_dim: The other one.
        core_dims: Mesh dimensions that split a core.
        contracted: Mesh dimensions whose ranks each have one term of a core.
        block: m and n of a rank's largest block: all ranks must send alike.
        held: Elements that a refresh of one matrix holds and gathers at a time.
        sends_dense: Whether a refresh sums dense gradients, not sketches, over the replicas.
        refresh_counts: Number of refreshes so far (b,), on the CPU.
    """

    C: Tensor

    def __init__(
        self,
        plans: Sequence[MatrixPlan],
        parameters: Sequence[Tensor],
        layout: Layout,
        ranks: Sequence[int],
        settings: TSRSettings,
    ) -> None:
        self.plans, self.parameters, self.settings = list(plans), list(parameters), settings
        self.plan = plan = plans[0]
        self.row_dim, self.column_dim = (1, 0) if plan.transposed else (0, 1)
        self.layout = layout
        self.block = layout.largest_block(plan.rows, plan.columns, ranks)
        sides = [[ranks[dim] for dim in dims] for dims in (layout.rows, layout.columns)]
        self.held = plan.held(self.block, sides)
        self.sends_dense, _ = plan.sends(*self.block)
        self.core_dims = () if plan.two_sided else layout.columns
        self.contracted = {*layout.rows, *layout.columns}.difference(self.core_dims)
        weight = local_part(parameters[0])
        b, r = len(parameters), plan.rank
        m, n = self._oriented(weight).shape
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": weight.device}
        self.U = torch.zeros(b, m, r, **kind)
        self.V = torch.zeros(b, n, r, **kind) if plan.two_sided else None
        self.exp_avg = torch.zeros(b, r, r if plan.two_sided else n, **kind)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.refresh_counts = torch.zeros(b, dtype=torch.int64)
        if plan.waits:
            self._draw_bases()

    def _draw_bases(self) -> None:
        """Draw the bases until the first refresh; each rank draws all rows, and keeps its own."""
        for i, (plan, parameter) in enumerate(zip(self.plans, self.parameters, strict=True)):
            basis = draw_basis(f"{plan.name}:left", (plan.rows, plan.rank))
            self.U[i].copy_(own_part(parameter, basis, {self.row_dim: 0}))
            if self.V is not None:
                basis = draw_basis(f"{plan.name}:right", (plan.columns, plan.rank))
                self.V[i].copy_(own_part(parameter, basis, {self.column_dim: 0}))

    def due(self, steps: int) -> list[int]:
        """Return the matrices that get new bases in the step after so many steps."""
        counts = self.refresh_counts.tolist()
        return [i for i, plan in enumerate(self.plans) if plan.is_due(steps, counts[i])]

    def project(self, index: int) -> None:
        """Accumulate a core, C ← C + UᵀGV, and free the gradient."""
        gradient = self._oriented(local_part(cast(Tensor, self.parameters[index].grad)))  # (m, n)
        self.parameters[index].grad = None
        half = self.U[index].mT @ gradient.to(self.dtype)  # (r, n)
        if self.V is None:
            self.C[index].add_(half)
        else:
            self.C[index].addmm_(half, self.V[index])

    def batch(self, indices: Sequence[int], groups: Groups) -> Batch:
        """Return some gradients, with their sketches, for `randomized_svd`."""
        gradients = []
        for i in indices:
            parameter = self.parameters[i]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(self._oriented(local_part(gradient)))  # (m, n)
        counts = self.refresh_counts.tolist()
        keys = [(self.plans[i].name, counts[i]) for i in indices]
        # Every rank draws the whole Ω (n, k) of each matrix, and keeps its own rows.
        full = draw_sketches(keys, (self.plan.columns, self.plan.width), self.U)
        own = [own_part(self.parameters[0], sketch, {self.column_dim: 0}) for sketch in full]
        return Batch(
            gradients,
            torch.stack(own),
            self.plan.rank,
            self.block,
            partial=groups.replicas is not None and not self.sends_dense,
            earlier=(read(self.U, indices), None if self.V is None else read(self.V, indices)),
        )

    def change_bases(self, new: NewBases, rejected: Tensor) -> None:
        """Replace the bases and carry the moments over according to ``tsr_moments``.

        ``keep`` leaves the moments unchanged (the published code; the new bases are sign-aligned
        with the old ones for this mode). ``rotate`` expresses them in the new bases (the paper's
        theory): with P = U₊ᵀU and Q = V₊ᵀV, m ← P·m·Qᵀ, and v by the
        squared entries of P and Q. The second moment holds variances of the core's entries; if
        these are independent, the variances of sums add with squared weights.

        A rejected step (a scalar on the device) keeps the old bases. The counters on the host
        change in any case; `TSRAdam.settle` or `TSRAdam.begin` sets them back.
        """
        i = new.indices
        changes = [(self.U, new.U)]
        if self.V is not None and new.V is not None:
            changes.append((self.V, new.V))
        if new.U_overlap is not None:
            P, Q = new.U_overlap, new.V_overlap  # (b, r, r)
            average, square = P @ read(self.exp_avg, i), P.square() @ read(self.exp_avg_sq, i)
            if Q is not None:
                average, square = average @ Q.mT, square @ Q.square().mT
            changes += [(self.exp_avg, average), (self.exp_avg_sq, square)]
        for state, changed in changes:
            write(state, i, torch.where(rejected, read(state, i), changed))
        self.refresh_counts[i] += 1

    def direction(self, steps: float, hyper: Mapping[str, Any], rejected: Tensor) -> Tensor:
        """Run Adam on the cores in step t: update their moments, and return D = m̂/(√v̂ + ε).

        Of a rejected step (a scalar on the device) the moments stay, and D is 0.
        """
        beta1, beta2, eps = (float(hyper[name]) for name in ("beta1", "beta2", "eps"))
        # m ← β₁m + (1 − β₁)C,  v ← β₂v + (1 − β₂)C∘C
        average = self.exp_avg.lerp(self.C, 1 - beta1)
        square = (self.exp_avg_sq * beta2).addcmul_(self.C, self.C, value=1 - beta2)
        torch.where(rejected, self.exp_avg, average, out=self.exp_avg)
        torch.where(rejected, self.exp_avg_sq, square, out=self.exp_avg_sq)
        # m̂ = m / (1 − β₁ᵗ),  v̂ likewise
        corrected = self.exp_avg / (1 - beta1**steps)
        D = corrected / ((self.exp_avg_sq / (1 - beta2**steps)).sqrt() + eps)
        return D.masked_fill(rejected, 0.0)

    def lift(self, D: Tensor, hyper: Mapping[str, Any], rejected: Tensor) -> None:
        """Lift directions to full matrices: W ← (1 − ηλ)W − ηα·UDVᵀ, where α is ``tsr_scale``.

        A rejected step (a scalar on the device) changes no bit of the weights.
        """
        lr, decay = float(hyper["lr"]), float(hyper["weight_decay"])
        # A rejected step multiplies weights by 1 and adds 0.
        shrink = torch.full_like(rejected, 1 - lr * decay, dtype=self.dtype)
        shrink.masked_fill_(rejected, 1.0)
        weights = [self._oriented(local_part(parameter)) for parameter in self.parameters]  # (m, n)
        in_place = weights[0].dtype == self.dtype
        if in_place and decay:
            torch._foreach_mul_(weights, shrink)  # all in one launch
        rate = -lr * self.settings.scale
        for i, weight in enumerate(weights):
            factors = self.U[i], D[i]  # (m, r) and (r, n)
            if self.V is not None:
                factors = self.U[i] @ D[i], self.V[i].mT
            if in_place:
                weight.addmm_(*factors, alpha=rate)
            else:
                # A narrower dtype would round the weight after each of the two operations.
                exact = weight.to(self.dtype).mul_(shrink)
                weight.copy_(exact.addmm_(*factors, alpha=rate))

    def tensors(self, index: int) -> list[Tensor]:
        """Return this rank's weight, bases and moments of a matrix: all that a refresh changes."""
        bases = [self.U[index]] if self.V is None else [self.U[index], self.V[index]]
        moments = [self.exp_avg[index], self.exp_avg_sq[index]]
        return [local_part(self.parameters[index]), *bases, *moments]

    def state(self, index: int) -> dict[str, Tensor]:
        """Return what a checkpoint holds of a matrix: DTensors of a sharded one, no copies."""
        matrix, plan = self.parameters[index], self.plan
        m, n, r = plan.rows, plan.columns, plan.rank
        core: Any = ((r, r), {}) if plan.two_sided else ((r, n), {self.column_dim: 1})
        state = {
            "left": wrap_like(matrix, self.U[index], (m, r), {self.row_dim: 0}),
            "exp_avg": wrap_like(matrix, self.exp_avg[index], *core),
            "exp_avg_sq": wrap_like(matrix, self.exp_avg_sq[index], *core),
            "refreshes": self.refresh_counts[index],
        }
        if self.V is not None:
            state["right"] = wrap_like(matrix, self.V[index], (n, r), {self.column_dim: 0})
        return state

    def _oriented(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.plan.transposed else matrix


def stack_alike(
    matrices: Sequence[tuple[MatrixPlan, Tensor]],
    sharding: Mapping[str, int],
    settings: TSRSettings,
) -> list[MatrixStack]:
    """Stack the matrices that are alike.

    ``sharding`` has the sizes of the run's mesh dimensions that split parameters, in order.
    """
    alike: dict[Any, list[tuple[MatrixPlan, Tensor]]] = defaultdict(list)
    for plan, parameter in matrices:
        part = local_part(parameter)
        row_dim, column_dim = (1, 0) if plan.transposed else (0, 1)
        layout = Layout(
            shard_dims(parameter, row_dim, sharding), shard_dims(parameter, column_dim, sharding)
        )
        shape = (plan.rows, plan.columns, plan.rank, plan.power_iterations, plan.transposed)
        alike[layout, shape, part.shape, part.dtype].append((plan, parameter))
    stacks = []
    for (layout, *_), same in alike.items():
        plans, parameters = zip(*same, strict=True)
        stacks.append(MatrixStack(plans, parameters, layout, list(sharding.values()), settings))
    return stacks


def read(stacked: Tensor, indices: Sequence[int]) -> Tensor:
    """Return a copy of some matrices of a stack."""
    # A list as an index would be copied to the device, for which the host waits.
    return torch.stack([stacked[i] for i in indices])


def write(stacked: Tensor, indices: Sequence[int], new: Tensor) -> None:
    """Copy matrices into their places of a stack."""
    torch._foreach_copy_([stacked[i] for i in indices], list(new.unbind()))
