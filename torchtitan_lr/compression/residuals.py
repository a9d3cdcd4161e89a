# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Residuals in checkpoints, and metrics of gradient compression."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.checkpoints.folders import RESIDUALS, is_dcp
from torchtitan_lr.checkpoints.safe_metadata import load, read_metadata
from torchtitan_lr.compression.compressor import COUNTS, Compressor
from torchtitan_lr.compression.settings import residual_name
from torchtitan_lr.errors import require
from torchtitan_lr.numerics import joint_norm

NAMES = "tensors"  # key of the names of the compressed tensors, in a checkpoint


@dataclass
class Residuals:
    """The state and the counts of a run's compressors.

    For every unit, a checkpoint has one DTensor (world, W, m), Shard(0), and the number of
    exchanges, which determines the seeds. A residual belongs to one rank's part of the batch, so
    only as many ranks can load it. The names of the tensors tell those of equal size apart.
    """

    compressors: Sequence[Compressor]
    _mesh: DeviceMesh | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return counters, and residuals that share the compressors' memory."""
        world = dist.get_world_size()
        if self._mesh is None:
            # The residuals of all ranks: each rank has its own, under HSDP too.
            self._mesh = DeviceMesh(self.compressors[0].device.type, list(range(world)))
        state: dict[str, Any] = {NAMES: " ".join(self._names())}
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

    def check_checkpoint(self, checkpoint_id: str, metadata: Metadata | None = None) -> None:
        """Compare a checkpoint's residuals with this rank's (`check_residuals`)."""
        world = dist.get_world_size()
        shapes = [(world, *compressor.residual.shape) for compressor in self.compressors]
        check_residuals(shapes, self._names(), checkpoint_id, metadata)

    def _names(self) -> list[str]:
        """Return the names of the compressed tensors."""
        spans = [span for compressor in self.compressors for span in compressor.spans]
        return [span.tensor for span in spans if span.compressed]


def check_residuals(
    here: Iterable[tuple[int, ...]],
    names: Iterable[str],
    checkpoint_id: str,
    metadata: Metadata | None = None,
) -> None:
    """Refuse a checkpoint with residuals of other ranks or tensors, before it is loaded."""
    # ``here`` has the shape (world, W, m) of the residual of every unit.
    saved = saved_residuals(checkpoint_id, metadata)
    skip = f"checkpoint.exclude_from_loading = ['{RESIDUALS}'] to start without residuals"
    want = f"'none' as in {checkpoint_id}, not saved with gradient compression, or {skip}"
    require(saved, "grad_compression.codec", "a codec", want)
    ranks = next(iter(saved.values()))[0]
    want = f"the ranks ({ranks}), layout and compressed tensors of {checkpoint_id}, "
    want += f"whose residuals cannot be resharded, or {skip}"
    fits = sorted(saved.values()) == sorted(here)
    require(fits, "grad_compression", "other residuals", want)
    metadata = metadata or read_metadata(checkpoint_id)
    stored = {RESIDUALS: {NAMES: ""}}
    load(stored, checkpoint_id, no_dist=True, metadata=metadata)
    theirs = set(stored[RESIDUALS][NAMES].split())
    if others := sorted(theirs ^ set(names)):
        kind = "compressed" if others[0] in theirs else "not compressed"
        if residual_name(others[0], by_columns=True) in others:
            kind = "split along its other dimension"
        want = f"the compressed tensors of {checkpoint_id}, where {others[0]} is {kind}, or {skip}"
        require(False, "grad_compression.layers", "other tensors", want)


def saved_residuals(
    checkpoint_id: str, metadata: Metadata | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the residuals in a checkpoint; only its metadata is read."""
    if not is_dcp(checkpoint_id):
        return {}
    metadata = metadata or read_metadata(checkpoint_id)
    found: Iterable[tuple[str, Any]] = metadata.state_dict_metadata.items()
    prefix = RESIDUALS + "."
    return {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in found
        if name.startswith(prefix) and name.endswith(".residual")
    }
