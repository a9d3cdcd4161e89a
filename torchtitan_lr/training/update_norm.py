# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How far a step moves the matrices of the blocks: a metric for every optimizer and layout.

Optimizers with orthogonal updates promise a bound on the spectral norm of a change; Adam has none.
The changes are measured, not derived: weights after the optimizer minus weights before it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.dtensor import local_part, with_local_part
from torchtitan_lr.numerics import spectral_norm

UPDATE_NORM = "spectral/update_norm"
"""Key in ``metrics.jsonl``: the largest spectral norm of a block's matrix's change in the step."""


class UpdateNorm:
    """Measures the changes of a rank's matrices: every factor, or every dense matrix, by itself.

    A measured step takes memory for a copy of this rank's shards. It gathers one whole matrix at a
    time, together as many bytes as one all-gather of the blocks' weights.

    Args:
        model_parts: The pipeline stages of this rank (one without pipelining).
        device: This rank's device.
    """

    def __init__(self, model_parts: Sequence[nn.Module], device: torch.device) -> None:
        blocks = [part.get_submodule("layers") for part in model_parts]
        self._matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2]
        self._device = device
        self._before: list[Tensor] = []

    def remember(self) -> None:
        """Copy this rank's shards of the weights, before the optimizer changes them."""
        self._before = [local_part(matrix).detach().clone() for matrix in self._matrices]

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the largest norm of all ranks since `remember`; call it on every rank."""
        largest = torch.zeros((), device=self._device)
        for matrix, before in zip(self._matrices, self._before, strict=True):
            change = with_local_part(matrix, local_part(matrix) - before)
            if isinstance(change, DTensor):
                change = change.full_tensor()
            norm = spectral_norm(change).to(largest)
            largest = torch.maximum(largest, norm)
        self._before = []
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # pipeline stages have other matrices
        return {UPDATE_NORM: largest.item()}
