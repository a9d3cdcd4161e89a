# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam whose refreshes start from the bases before: U ← orth(GV), V ← orth(GᵀU), no SVD.

A run names this module by ``experimental.custom_import``; `experiments/tsr_warm.toml` does. Only
for two-sided cores whose moments are kept.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from torchtitan_lr.optim.entries import build_optimizers, register_optimizer, variant
from torchtitan_lr.optim.tsr.stack import MatrixStack, Refreshed, local_gradient, read
from torchtitan_lr.optim.tsr.sums import Drift
from torchtitan_lr.optim.tsr.svd import Batch, tsqr, turns


class WarmStack(MatrixStack):
    """A stack that finds its first bases by the SVD, and the others from those before."""

    def refresh(self, indices: list[int], drift: Drift) -> Refreshed:
        """Find U, V and the cores C = UᵀGV = RᵀVᵀV = Rᵀ, where GᵀU = VR; signs as before."""
        if self.V is None or not all(self.refresh_counts[i] for i in indices):
            return super().refresh(indices, drift)
        gradients = [self._oriented(local_gradient(self.parameters[i])) for i in indices]
        batch = Batch(gradients, self.shards, None if self.sends_dense else self.groups)
        old_U, old_V, shards = read(self.U, indices), read(self.V, indices), self.shards
        U, _ = tsqr(batch.times(old_V), shards.m, shards.rows)
        V, R = tsqr(batch.times(U, transposed=True), shards.n, shards.columns)
        every = R.new_ones(len(indices), 1, self.plan.rank)
        u = turns(U, old_U, every, shards.rows)[:, None, :]  # 1 or -1
        v = turns(V, old_V, every, shards.columns)[:, None, :]
        return Refreshed(self, indices, u.mT * R.mT * v, [(self.U, U * u), (self.V, V * v)])


def build(model_parts: list[nn.Module], config: Any, parallel_dims: Any) -> Any:
    """Build TSR-Adam, and let its stacks refresh from the bases before."""
    container = build_optimizers(model_parts, replace(config, name="TSRAdam"), parallel_dims)
    for stack in container.gradients.stacks:
        stack.__class__ = WarmStack
    return container


register_optimizer(variant("TSRAdam", "TSRWarm", build))
