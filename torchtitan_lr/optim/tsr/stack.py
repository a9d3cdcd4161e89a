# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Algorithm 1's equations, on matrices that are alike; AdamW on what is not compressed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torchtitan_lr.compat.dtensor import local_part, own_part, wrap_like
from torchtitan_lr.numerics import rounded_once
from torchtitan_lr.optim.own_optimizer import alike
from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings
from torchtitan_lr.optim.tsr.sums import Drift, ProcessGroups, summed
from torchtitan_lr.optim.tsr.svd import Batch, Shards, draw_basis, draw_sketches, randomized_svd


@dataclass
class Refreshed:
    """What a refresh has found for some matrices of a stack."""

    stack: "MatrixStack"
    indices: list[int]  # the matrices' places in it
    C: Tensor  # their cores in the new bases, (b, r, r) or (b, r, n)
    changes: list[tuple[Tensor, Tensor]]
    """States of the whole stack, each with these matrices' new ones: bases, rotated moments."""

    def accept(self, rejected: Tensor) -> None:
        """Change the states; of a rejected step (a scalar on the device) they stay."""
        for state, changed in self.changes:
            write(state, self.indices, torch.where(rejected, read(state, self.indices), changed))


class MatrixStack:
    """Algorithm 1's equations, on b matrices of equal shape, rank and layout.

    Stacked matrices need fewer kernels. Every tensor here is this rank's part: rows of U, and of V,
    are sharded like the matrices' rows and columns, and a one-sided core like their columns.
    """

    C: Tensor
    """The cores of the running step (b, r, r), or (b, r, n); `TSRAdam` provides the memory."""

    def __init__(
        self,
        plans: Sequence[MatrixPlan],
        parameters: Sequence[Tensor],
        groups: ProcessGroups,
        settings: TSRSettings,
    ) -> None:
        self.plans, self.parameters = list(plans), list(parameters)
        self.groups, self.settings = groups, settings
        # What the matrices have in common: shape, rank and power iterations.
        self.plan = plan = plans[0]
        # The dimensions of a parameter that its rows and columns are, as it is projected.
        self.row_dim, self.column_dim = (1, 0) if plan.transposed else (0, 1)
        rows, columns = (
            groups.splitting(parameters[0], dim) for dim in (self.row_dim, self.column_dim)
        )
        sizes = [[group.size() for group in split] for split in (rows, columns)]
        block = [_largest(plan.rows, sizes[0]), _largest(plan.columns, sizes[1])]
        self.shards = Shards(rows, columns, *block)
        # Elements that a refresh of one matrix holds and gathers at a time.
        self.held = plan.held(block, sizes)
        # The groups whose ranks share a refresh's small decompositions.
        self.sharing = (*rows, *columns)
        if settings.share_refresh and groups.replicas is not None:
            self.sharing += (groups.replicas,)
        # Whether a refresh sums dense gradients, not sketches, over the replicas.
        self.sends_dense, _ = plan.sends(*block)
        # The number of ranks that split a core, and the groups whose ranks have terms of it.
        self.core_ranks = 1 if plan.two_sided else prod(sizes[1])
        self.contracted = {*rows, *columns} if plan.two_sided else {*rows}
        weight = local_part(parameters[0])
        b, r = len(parameters), plan.rank
        m, n = self._oriented(weight).shape
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": weight.device}
        self.U = torch.zeros(b, m, r, **kind)
        self.V = torch.zeros(b, n, r, **kind) if plan.two_sided else None
        self.exp_avg = torch.zeros(b, r, r if plan.two_sided else n, **kind)  # like C
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.refresh_counts = torch.zeros(b, dtype=torch.int64)  # on the CPU
        if plan.waits:
            self._draw_bases()

    def _draw_bases(self) -> None:
        """Draw the bases until the first refresh; each rank draws all rows, and keeps its own."""
        like, r = self.parameters[0], self.plan.rank
        for i, plan in enumerate(self.plans):
            basis = draw_basis(f"{plan.name}:left", (plan.rows, r))
            self.U[i].copy_(own_part(like, basis, {self.row_dim: 0}))
            if self.V is not None:
                basis = draw_basis(f"{plan.name}:right", (plan.columns, r))
                self.V[i].copy_(own_part(like, basis, {self.column_dim: 0}))

    def due(self, steps: int) -> list[int]:
        """Return the matrices that get new bases in the step after so many steps."""
        counts = self.refresh_counts.tolist()
        return [i for i, plan in enumerate(self.plans) if plan.is_due(steps, counts[i])]

    def refresh(self, indices: list[int], drift: Drift) -> Refreshed:
        """Find U, Σ, V ← randomized SVD of ΣG of some matrices, their cores and moments.

        ``tsr_moments = "rotate"`` expresses the moments in the new bases (the paper's theory): with
        P = U₊ᵀU and Q = V₊ᵀV, m ← P·m·Qᵀ, and v by the squared entries of P and Q, as variances of
        sums of independent entries add.
        """
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
        old_U, old_V = read(self.U, indices), None if self.V is None else read(self.V, indices)
        batch = Batch(gradients, self.shards, None if self.sends_dense else self.groups)
        how = self.plan.rank, self.plan.power_iterations, (old_U, old_V), self.sharing
        U, S, V = randomized_svd(batch, torch.stack(own), *how)
        depends = [t for t in (self.U, self.V, self.exp_avg, self.exp_avg_sq) if t is not None]
        states = {}
        for i in indices:
            states[self.plans[i].name] = [local_part(self.parameters[i]), *(t[i] for t in depends)]
        drift.compare(states, zip(U, S, V, strict=True))
        changes = [(self.U, U)]
        # In the new bases UᵀGV is diag(σ), and UᵀG is diag(σ)Vᵀ: nothing is sent for it.
        if self.V is not None:
            changes.append((self.V, V))
            C = torch.diag_embed(S)  # (b, r, r)
        else:
            C = S[..., None] * V.mT  # (b, r, n)
        if self.settings.moments == "rotate":
            P = summed(U.mT @ old_U, self.shards.rows)  # (b, r, r)
            m, v = P @ read(self.exp_avg, indices), P.square() @ read(self.exp_avg_sq, indices)
            if old_V is not None:
                Q = summed(V.mT @ old_V, self.shards.columns)  # (b, r, r)
                m, v = m @ Q.mT, v @ Q.square().mT
            changes += [(self.exp_avg, m), (self.exp_avg_sq, v)]
        return Refreshed(self, indices, C, changes)

    def project(self, index: int) -> None:
        """Accumulate a core, C ← C + UᵀGV, and free the gradient."""
        gradient = self._oriented(local_part(cast(Tensor, self.parameters[index].grad)))  # (m, n)
        self.parameters[index].grad = None
        half = self.U[index].mT @ gradient.to(self.dtype)  # (r, n)
        if self.V is None:
            self.C[index].add_(half)
        else:
            self.C[index].addmm_(half, self.V[index])

    def update(self, steps: float, hyper: Mapping[str, Any], rejected: Tensor) -> None:
        """Run Adam on the cores in step t, and lift its direction to the weights.

        A rejected step (a scalar on the device) changes no bit of moments and weights.
        """
        beta1, beta2, eps = (float(hyper[name]) for name in ("beta1", "beta2", "eps"))
        lr, decay = float(hyper["lr"]), float(hyper["weight_decay"])
        # m ← β₁m + (1 − β₁)C,  v ← β₂v + (1 − β₂)C∘C
        average = self.exp_avg.lerp(self.C, 1 - beta1)
        square = (self.exp_avg_sq * beta2).addcmul_(self.C, self.C, value=1 - beta2)
        torch.where(rejected, self.exp_avg, average, out=self.exp_avg)
        torch.where(rejected, self.exp_avg_sq, square, out=self.exp_avg_sq)
        # D = m̂/(√v̂ + ε), where m̂ = m / (1 − β₁ᵗ) and v̂ likewise
        corrected = self.exp_avg / (1 - beta1**steps)
        D = corrected / ((self.exp_avg_sq / (1 - beta2**steps)).sqrt() + eps)
        # W ← (1 − ηλ)W − ηα·UDVᵀ. A rejected step multiplies weights by 1 and adds 0.
        D = D.masked_fill(rejected, 0.0)
        shrink = torch.full_like(rejected, 1 - lr * decay, dtype=self.dtype)
        shrink.masked_fill_(rejected, 1.0)
        weights = [self._oriented(local_part(parameter)) for parameter in self.parameters]  # (m, n)
        in_place = weights[0].dtype == self.dtype
        if in_place and decay:
            torch._foreach_mul_(weights, shrink)  # all in one launch
        for i, weight in enumerate(weights):
            factors = self.U[i], D[i]  # (m, r) and (r, n)
            if self.V is not None:
                factors = self.U[i] @ D[i], self.V[i].mT
            with rounded_once([weight]) as (exact,):
                if not in_place:
                    exact.mul_(shrink)
                exact.addmm_(*factors, alpha=-lr * self.settings.scale)

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


class DenseParameters:
    """The parameters that are not compressed, plain or DTensors, with AdamW's moments."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.exp_avg: list[Tensor] = []
        self.exp_avg_sq: list[Tensor] = []
        for parameter in parameters:
            part = local_part(parameter).detach()
            wide = torch.promote_types(part.dtype, torch.float32)
            self.exp_avg.append(torch.zeros_like(part, dtype=wide))
            self.exp_avg_sq.append(torch.zeros_like(part, dtype=wide))

    def state(self, index: int) -> dict[str, Tensor]:
        """Return what a checkpoint holds of a parameter: DTensors of a sharded one, no copies."""
        parameter = self.parameters[index]
        like = (tuple(parameter.shape), {dim: dim for dim in range(parameter.dim())})
        return {
            "exp_avg": wrap_like(parameter, self.exp_avg[index], *like),
            "exp_avg_sq": wrap_like(parameter, self.exp_avg_sq[index], *like),
        }

    def update(self, steps: float, hyper: Mapping[str, Any], rejected: Tensor) -> None:
        """Run AdamW, W ← (1 − ηλ)W − η·m̂/(√v̂ + ε), by torch's fused kernel.

        Weights of a narrower dtype are updated in the moments' dtype, and rounded once. A rejected
        step (a scalar on the device) changes no bit.
        """
        if not self.parameters:
            return
        gradients = [
            local_gradient(parameter).to(m.dtype)
            for parameter, m in zip(self.parameters, self.exp_avg, strict=True)
        ]
        options: dict[str, Any] = {
            name: float(hyper[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")
        }
        # The kernel counts steps on the device; TSR-Adam's counter is on the host.
        counts = torch.full((len(gradients),), steps - 1, device=gradients[0].device)
        with rounded_once([local_part(parameter) for parameter in self.parameters]) as exact:
            adamw(
                exact,
                gradients,
                self.exp_avg,
                self.exp_avg_sq,
                [],
                list(counts.unbind()),
                fused=True,
                found_inf=rejected.float(),
                amsgrad=False,
                maximize=False,
                **options,
            )


def stack_alike(
    matrices: Sequence[tuple[MatrixPlan, Tensor]], groups: ProcessGroups, settings: TSRSettings
) -> list[MatrixStack]:
    """Stack the matrices that are alike."""

    def kind(matrix: tuple[MatrixPlan, Tensor]) -> Hashable:
        plan, parameter = matrix
        part = local_part(parameter)
        split = tuple(groups.splitting(parameter, dim) for dim in (0, 1))
        shape = (plan.rows, plan.columns, plan.rank, plan.power_iterations, plan.transposed)
        return split, shape, part.shape, part.dtype

    stacks = []
    for same in alike(matrices, kind):
        plans, parameters = zip(*same, strict=True)
        stacks.append(MatrixStack(plans, parameters, groups, settings))
    return stacks


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, to sum in place; create zeros if there is none."""
    if parameter.grad is None:
        # Other replicas may have one: every rank takes part in the sum.
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


def read(stacked: Tensor, indices: Sequence[int]) -> Tensor:
    """Return a copy of some matrices of a stack."""
    # A list as an index would be copied to the device, for which the host waits.
    return torch.stack([stacked[i] for i in indices])


def write(stacked: Tensor, indices: Sequence[int], new: Tensor) -> None:
    """Copy matrices into their places of a stack."""
    torch._foreach_copy_([stacked[i] for i in indices], list(new.unbind()))


def _largest(length: int, ranks: Sequence[int]) -> int:
    """Return the length of a rank's largest block: all ranks must decide alike."""
    for size in ranks:
        length = -(-length // size)
    return length
