# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient compression under FSDP2: a custom reduce-scatter for every unit, or a hook.

Without replicas, the reduce-scatter over the shards is compressed. HSDP shards within a host and
compresses the exchange between hosts: `fully_shard` gets the shard mesh only, and after its plain
reduce-scatter a hook sums the shards over the replicas. Both overlap with backward
(`ExchangeOverlap`), in a process group in which FSDP2 gathers no weights. Only the last micro-batch
of a step communicates.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.collectives import reduce_scatter, second_group
from torchtitan_lr.compat.fsdp import ReduceScatter, reads_sums_at_once, unit_parameters
from torchtitan_lr.compression.codecs.base import Steps, Works
from torchtitan_lr.compression.compressor import Compressor, Span, join_spans, split_spans
from torchtitan_lr.compression.overlap import ExchangeOverlap, finish
from torchtitan_lr.compression.settings import CompressionSettings, is_compressed, merged
from torchtitan_lr.compression.sizes import bits_per_entry, exchange_unit
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import logger

_COMPRESSORS: WeakKeyDictionary[object, Compressor] = WeakKeyDictionary()
"""The compressor of every compressed unit.

FSDP2 has it too, in private fields, which a run without compression must not read.
"""


class UnitExchange:
    """A unit's exchange of gradients, which may overlap with backward.

    Args:
        compressor: The unit's compressor.
        overlap: The model's exchanges; None to end each one before the call returns.
        unit: The unit, whose sums may be written later; None likewise.
    """

    def __init__(
        self,
        compressor: Compressor,
        overlap: ExchangeOverlap | None = None,
        unit: FSDPModule | None = None,
    ) -> None:
        self.compressor, self.unit = compressor, unit
        self.overlap = overlap or ExchangeOverlap(compressor.device)

    def run(self, steps: Steps[None], sums: Tensor, *inputs: Tensor) -> None:
        """Run an exchange that writes `sums` (s,); the inputs live until it has ended.

        Raises:
            RuntimeError: A tensor of the unit has no gradient.
        """
        expected = sum(span.size for span in self.compressor.spans)
        if sums.numel() != expected:
            raise RuntimeError(
                f"{self.compressor.name}: {sums.numel()} gradients a rank instead of {expected}: "
                "a tensor of this unit took no part in the step"
            )
        later = self.unit is not None and not reads_sums_at_once(self.unit, sums)
        self.overlap.run(steps, self.resume, [sums, *inputs], later)

    def resume(self, steps: Steps[None], works: Works) -> None:
        """End an exchange; the ledger attributes its collectives to this unit."""
        finish(steps, works)


class CompressedReduceScatter(UnitExchange, ReduceScatter):
    """FSDP2's reduce-scatter of a unit's gradients (W, s), in which tensors are concatenated."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, as FSDP2's default does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the gradients.

        Args:
            output_tensor: (s,), this rank's sums.
            input_tensor: (W·s,), this rank's gradients.
            group: The ranks of the shard dimension.
            op: Must be a sum.
            async_op: Must be false, as in FSDP2.

        Raises:
            RuntimeError: Other arguments, or a tensor of the unit without gradient.
        """
        if op != dist.ReduceOp.SUM or async_op:
            raise RuntimeError(f"compressed gradients are summed, synchronously; asked for {op}")
        if not self.compressor.compressed_size:
            reduce_scatter(output_tensor, input_tensor, group=group)
            return None
        self.run(self._steps(output_tensor, input_tensor), output_tensor, input_tensor)
        return None

    def _steps(self, output: Tensor, gradients: Tensor) -> Steps[None]:
        spans, ranks = self.compressor.spans, self.compressor.unit.ranks
        rows, dense = split_spans(gradients.view(ranks, -1), spans)
        sums = yield from self.compressor.exchange_rows(rows, dense)
        join_spans(*sums, spans, output)


class CompressedAllReduce(UnitExchange):
    """FSDP2's all-reduce hook: sums a unit's shard over the replicas, in place."""

    def __call__(self, shard: Tensor) -> None:
        """Sum the shard (s,) over the replicas."""
        if shard.device.type != "cpu":
            # FSDP2 allocates the shard on its reduce-scatter stream and calls the hook on its
            # all-reduce stream. If gradients are stored in another dtype than they are summed in,
            # it frees the shard when the cast is queued; it holds the shard only for its own
            # all-reduce. The next unit's reduce-scatter could overwrite a shard that is still
            # being summed.
            shard.record_stream(torch.get_device_module(shard.device).current_stream())
        self.run(self._steps(shard), shard)

    def _steps(self, shard: Tensor) -> Steps[None]:
        compressor = self.compressor
        if not compressor.compressed_size:
            yield [dist.all_reduce(shard, group=compressor.group, async_op=True)]
            return
        flat, dense = split_spans(shard, compressor.spans)
        ranks = compressor.unit.ranks
        padded = nn.functional.pad(flat, (0, ranks * compressor.unit.compressed - len(flat)))
        total, _ = yield from compressor.exchange_rows(padded.view(ranks, -1))
        flat = yield from compressor.spread(total)
        if dense.numel():
            yield [dist.all_reduce(dense, group=compressor.group, async_op=True)]
        # Behind the last entry is what filled up the last rank's part.
        join_spans(flat[: compressor.compressed_size], dense, compressor.spans, shard)


def apply_gradient_compression(
    model: nn.Module, mesh: DeviceMesh, settings: CompressionSettings, all_reduce: bool
) -> None:
    """Set the compressor of every FSDP2 unit of a model.

    A unit that is too small for its codec is sent dense.

    Args:
        model: Sharded with `fully_shard`; may still be on the meta device.
        mesh: The compressed dimension: the shards, or HSDP's replicas.
        settings: The codec and the selection of tensors.
        all_reduce: Whether the mesh is HSDP's replicas.

    Raises:
        ConfigError: No tensor is selected.
    """
    names = {id(p): clean_name(name) for name, p in model.named_parameters()}
    sizes = {clean_name(name): p.numel() for name, p in model.named_parameters()}
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
            chosen -= parts.keys()
        compressor = _COMPRESSORS[module] = Compressor(
            unit_name,
            settings.codec,
            [Span(size, name in chosen) for name, size in parts.items()],
            group,
            device,
            settings.residual_dtype,
            all_reduce,
            settings.revocable,
        )
        if all_reduce:
            module.set_all_reduce_hook(CompressedAllReduce(compressor, overlap, module))
        else:
            module.set_custom_reduce_scatter(CompressedReduceScatter(compressor, overlap, module))
    _log(settings, sizes, chosen, too_small, all_reduce)


def compressor_of(module: object) -> Compressor | None:
    """Return the compressor of an FSDP2 unit, None without compression."""
    return _COMPRESSORS.get(module)


def compressors_of(model_parts: Iterable[nn.Module]) -> list[Compressor]:
    """Return the compressors with a residual, in the order of the model."""
    found = (compressor_of(module) for part in model_parts for module in part.modules())
    return [compressor for compressor in found if compressor and compressor.compressed_size]


def _log(
    settings: CompressionSettings,
    parameters: dict[str, int],
    chosen: set[str],
    too_small: list[str],
    all_reduce: bool,
) -> None:
    """Log the codec, the compressed tensors with blocks merged, and their share."""
    codec, ranks = settings.codec, settings.ranks
    if codec.theta > settings.requested_theta:
        what = (
            "Gradient compression: theta raised from %g to %g, the least that %d ranks can decode"
        )
        logger.info(what, settings.requested_theta, codec.theta, ranks)
    total = sum(parameters.values())
    logger.info(
        "Gradient compression: %s over %d ranks, theta %g, %.2f bits a compressed parameter; "
        "%d of %d tensors compressed, %.1f%% of %s parameters (%s); dense: %s",
        codec.name if codec.name == "sparse" else f"{codec.name} (c = {codec.c:g})",
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
