# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""PowerSGD (Vogels et al., arXiv 1905.13727) by torch's own hook, as the gradients of a step.

The hook is DDP's and reads a bucket. DDP puts up to 25 MB of gradients into one, and so all of the
race's models. Here the bucket is filled after backward, when DDP would call the hook.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.costs.messages import Traffic, mean_of
from torchtitan_lr.costs.optimizer_costs import OptimizerCost
from torchtitan_lr.optim.entries import Function, build_optimizers
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer

DENSE_STEPS = 10
"""Steps before the first compressed one: early gradients change quickly, the hook's notes say."""


class WaitingGroup(dist.ProcessGroup):
    """A process group whose sums have ended when they return.

    The hook starts its second and third sum in callbacks of the one before. Gloo runs these in the
    thread that sums; a run's groups have one such thread, which would wait for itself, and the
    ledger of the main thread would not see the sums.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Sum, wait, and return the work that has ended."""
        work = self._group.allreduce(tensors, options)
        work.wait()
        return work


def bucket_of(gradients: Sequence[Tensor]) -> Any:
    """Return what the hook reads of a DDP bucket, for all gradients of a rank in one buffer."""
    buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = buffer.split([gradient.numel() for gradient in gradients])
    views = [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]
    return SimpleNamespace(
        buffer=lambda: buffer, gradients=lambda: views, index=lambda: 0, is_last=lambda: True
    )


class PowerSGDGradients(StoredGradients):
    """Gradients that the hook averages over the replicas, with its error feedback and warm start.

    Pipelines are not supported.
    """

    def __init__(
        self, model_parts: Sequence[nn.Module], group: dist.ProcessGroup, rank: int
    ) -> None:
        super().__init__(model_parts, None)
        self._replicas = group.size()
        self.state = PowerSGDState(WaitingGroup(group), rank, start_powerSGD_iter=DENSE_STEPS)

    @torch.no_grad()
    def finish_sums(self) -> Tensor:
        """Exchange all gradients; return this rank's share of the squared norm."""
        # From the last parameter to the first, as DDP: the first Q are drawn in this order.
        gradients = [local_part(gradient) for gradient in reversed(self._gradients())]
        bucket = bucket_of(gradients)
        powerSGD_hook(self.state, bucket).wait()
        for gradient, mean in zip(gradients, bucket.gradients(), strict=True):
            # The loss is divided by the tokens of all replicas: the gradient is their sum.
            gradient.copy_(mean * self._replicas)
        return super().finish_sums()


class PowerSGDCost(OptimizerCost):
    """AdamW's, and the sums of the hook: tensors that are not compressed, P (n, r) and Q (m, r)."""

    def __init__(self, run: Any, rank: int) -> None:
        super().__init__(run)
        self.rank = rank

    def traffic(self, pp_rank: int) -> list[Traffic]:
        """Return the sums of a step after the dense ones."""
        sums: Counter[str] = Counter()
        for rows, *others in self.run.pieces_of(pp_rank).values():
            columns = prod(others)
            rank = min(rows, columns, self.rank)
            if 2 * rank * (rows + columns) < rows * columns:  # the hook's limit
                sums += Counter({"P": rows * rank, "Q": columns * rank})
            else:
                sums["whole"] += rows * columns
        return [_summed(size) for size in sums.values()]

    def mean_traffic(self, pp_rank: int) -> list[Traffic]:
        """Return the sums of a mean step of the run, the dense ones among them."""
        whole = _summed(sum(map(prod, self.run.pieces_of(pp_rank).values())))
        steps, later = self.run.config.training.steps, self.traffic(pp_rank)
        return mean_of([whole] * DENSE_STEPS + later * (steps - DENSE_STEPS), steps)


def _summed(size: int) -> Traffic:
    return Traffic("optimizer", "optimizer", "all_reduce", "gradient", 1, size, "dp_replicate")


def powersgd(rank: int) -> Function:
    """Return what builds AdamW with gradients by PowerSGD of a rank."""

    def build(
        model_parts: list[nn.Module], config: OptimizerConfig, dims: ParallelDims
    ) -> OptimizersContainer:
        optimizers = build_optimizers(model_parts, replace(config, name="AdamW"), dims)
        replicas = dims.get_mesh("dp_replicate").get_group()
        optimizers.gradients = PowerSGDGradients(model_parts, replicas, rank)
        return optimizers

    return build
