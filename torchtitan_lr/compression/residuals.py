# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Residuals in checkpoints, and metrics of gradient compression."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.compression.compressor import COUNTS, Compressor
from torchtitan_lr.numerics import joint_norm


@dataclass
class Residuals:
    """The state and the counts of a run's compressors.

    For every unit, a checkpoint has one DTensor (world, W, m), Shard(0), and the number of
    exchanges, which determines the seeds. A residual belongs to one rank's part of the batch, so
    only the same layout can load it (`training.fingerprint`).
    """

    compressors: Sequence[Compressor]
    _mesh: DeviceMesh | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return counters, and residuals that share the compressors' memory."""
        world = dist.get_world_size()
        if self._mesh is None:
            # The residuals of all ranks: each rank has its own, under HSDP too.
            self._mesh = DeviceMesh(self.compressors[0].device.type, list(range(world)))
        state: dict[str, Any] = {}
        for compressor in self.compressors:
            local = compressor.residual.unsqueeze(0)
            shape = torch.Size((world, *compressor.residual.shape))
            state[f"{compressor.name}.residual"] = DTensor.from_local(
                local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride()
            )
            state[f"{compressor.name}.exchanges"] = compressor.exchanges
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the counters; residuals were loaded in place."""
        for compressor in self.compressors:
            compressor.exchanges = int(state_dict[f"{compressor.name}.exchanges"])
            saved = state_dict[f"{compressor.name}.residual"]
            local = saved.to_local() if isinstance(saved, DTensor) else saved
            compressor.residual.copy_(local.reshape(compressor.residual.shape))

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last measured step, if any; all ranks call this."""
        # ``unpeeled_share`` is of the sent entries. ``bytes_saved`` is of this rank in one step;
        # HSDP's plain all-reduce counts its shard once, as in the ledger.
        measured = [
            torch.cat([c.counts, joint_norm([c.residual]).double().square().view(1)])
            for c in self.compressors
            if c.counts is not None
        ]
        if not measured:
            return {}
        total = torch.stack(measured).sum(0)
        dist.all_reduce(total)
        sums = dict(zip((*COUNTS, "residual_square"), total.tolist(), strict=True))
        entries = sum(c.unit.ranks * c.unit.compressed for c in self.compressors)
        return {
            "grad_compression/sparsity": 1 - sums["sent"] / (entries * dist.get_world_size()),
            "grad_compression/unpeeled_share": sums["unpeeled"] / max(1.0, sums["indexed"]),
            "grad_compression/residual_norm": sums["residual_square"] ** 0.5,
            "grad_compression/bytes_saved": float(sum(c.bytes_saved for c in self.compressors)),
        }
