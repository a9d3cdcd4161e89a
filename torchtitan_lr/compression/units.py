# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient compression under FSDP2: a custom reduce-scatter for every unit, or a hook.

HSDP shards within a host and compresses the exchange between hosts: after FSDP2's plain
reduce-scatter a hook sums the shards over the replicas. Only the last micro-batch of a step
communicates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.fsdp import unit_parameters
from torchtitan_lr.compat.process_groups import second_group
from torchtitan_lr.compression.compressor import COUNTS, Compressor, ExchangeStream
from torchtitan_lr.compression.settings import (
    CompressionSettings,
    bits_per_entry,
    exchange_unit,
    is_compressed,
    merged,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.numerics import joint_norm
from torchtitan_lr.titan import logger

# The compressor of every compressed unit. FSDP2 has it too, in private fields, which a run without
# compression must not read.
COMPRESSORS: WeakKeyDictionary[object, Compressor] = WeakKeyDictionary()


def apply_gradient_compression(
    model: nn.Module, mesh: DeviceMesh, settings: CompressionSettings, all_reduce: bool
) -> None:
    """Set the compressor of every FSDP2 unit of a model, over the shards or HSDP's replicas."""
    # A unit that is too small for its codec is sent dense. A ConfigError says that no tensor is
    # selected.
    names, sizes = {}, {}
    for full_name, parameter in model.named_parameters():
        name = names[id(parameter)] = clean_name(full_name)
        sizes[name] = parameter.numel()
    chosen = {name for name, size in sizes.items() if is_compressed(name, size, settings)}
    if not chosen:
        want = "a selection that some tensor fits"
        raise ConfigError("grad_compression.layers", settings.layers, want)
    device, stream = torch.device(mesh.device_type), None
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        stream = ExchangeStream(device)
    # FSDP2 sends nothing over HSDP's replicas, but it gathers weights over the shards.
    group = mesh.get_group() if all_reduce else second_group(mesh.get_group())
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        unit_name = clean_name(name + ".").rstrip(".") or "root"
        parts = {names[id(p)]: size for p, size in unit_parameters(module)}
        entries = sum(size for name, size in parts.items() if name in chosen)
        if not exchange_unit(settings.codec, entries, 0, all_reduce).compressed:
            chosen -= parts.keys()  # what is logged is what travels compressed
        spans = [(size, name in chosen) for name, size in parts.items()]
        compressor = COMPRESSORS[module] = Compressor(
            unit_name,
            settings.codec,
            spans,
            group,
            device,
            all_reduce,
            settings.revocable,
            stream,
            module,
        )
        if all_reduce:
            module.set_all_reduce_hook(compressor.all_reduce)
        else:
            module.set_custom_reduce_scatter(compressor)
    logger.info(
        "Gradient compression: %s, %.2f bits a compressed parameter; %.1f%% of %s parameters (%s); "
        "dense, as other tensors or too small to decode: %s",
        settings.codec,
        bits_per_entry(settings.codec, all_reduce),
        100 * sum(sizes[name] for name in chosen) / sum(sizes.values()),
        f"{sum(sizes.values()):,}",
        merged(name for name in sizes if name in chosen),
        merged(name for name in sizes if name not in chosen),
    )


def compressors_of(model_parts: Iterable[nn.Module]) -> list[Compressor]:
    """Return the compressors with a residual, in the order of the model."""
    found = (COMPRESSORS.get(module) for part in model_parts for module in part.modules())
    return [compressor for compressor in found if compressor and compressor.compressed_size]


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
