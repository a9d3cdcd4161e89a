# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient compression under FSDP2: a custom reduce-scatter for every unit, or a hook.

HSDP shards within a host and compresses the exchange between hosts: after FSDP2's plain
reduce-scatter a hook sums the shards over the replicas. Only the last micro-batch of a step
communicates.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.fsdp import unit_parameters
from torchtitan_lr.compat.process_groups import second_group
from torchtitan_lr.compression.compressor import Compressor, Span
from torchtitan_lr.compression.exchange_overlap import ExchangeOverlap
from torchtitan_lr.compression.settings import (
    CompressionSettings,
    is_compressed,
    merged,
)
from torchtitan_lr.compression.sizes import bits_per_entry, exchange_unit
from torchtitan_lr.errors import ConfigError
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
        raise ConfigError(
            "grad_compression.layers", settings.layers, "a selection that some tensor fits"
        )
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    # FSDP2 sends nothing over HSDP's replicas, but it gathers weights over the shards.
    group = mesh.get_group() if all_reduce else second_group(mesh.get_group())
    too_small, overlap = [], ExchangeOverlap(device)
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        unit_name = clean_name(name + ".").rstrip(".") or "root"
        parts = {names[id(p)]: size for p, size in unit_parameters(module)}
        entries = sum(size for name, size in parts.items() if name in chosen)
        if not exchange_unit(settings.codec, entries, 0, mesh.size(), all_reduce).compressed:
            too_small += [unit_name] if entries else []
            chosen -= parts.keys()  # what is logged is what travels compressed
        compressor = COMPRESSORS[module] = Compressor(
            unit_name,
            settings.codec,
            [Span(size, name in chosen) for name, size in parts.items()],
            group,
            device,
            all_reduce,
            settings.revocable,
            overlap,
            module,
        )
        if all_reduce:
            module.set_all_reduce_hook(compressor.all_reduce)
        else:
            module.set_custom_reduce_scatter(compressor)
    _log(settings, sizes, chosen, too_small, all_reduce)


def compressors_of(model_parts: Iterable[nn.Module]) -> list[Compressor]:
    """Return the compressors with a residual, in the order of the model."""
    found = (COMPRESSORS.get(module) for part in model_parts for module in part.modules())
    return [compressor for compressor in found if compressor and compressor.compressed_size]


def _log(
    settings: CompressionSettings,
    parameters: dict[str, int],
    chosen: set[str],
    too_small: list[str],
    all_reduce: bool,
) -> None:
    codec, ranks = settings.codec, settings.ranks
    if codec.theta > (asked := settings.requested_theta):
        what = "theta raised from %g to %g, the least that %d ranks can decode"
        logger.info(f"Gradient compression: {what}", asked, codec.theta, ranks)
    total = sum(parameters.values())
    logger.info(
        "Gradient compression: %s over %d ranks, theta %g, %.2f bits a compressed parameter; "
        "%d of %d tensors compressed, %.1f%% of %s parameters (%s); dense: %s",
        f"{codec.name} (c = {codec.c:g})" if codec.name == "sketch" else codec.name,
        ranks,
        codec.theta,
        bits_per_entry(codec, ranks if all_reduce else 0),
        len(chosen),
        len(parameters),
        100 * sum(parameters[name] for name in chosen) / max(1, total),
        f"{total:,}",
        merged(name for name in parameters if name in chosen),
        merged(name for name in parameters if name not in chosen),
    )
    if too_small:
        what = "Gradient compression: too small for a sketch to peel, so dense: %s"
        logger.info(what, merged(too_small))
