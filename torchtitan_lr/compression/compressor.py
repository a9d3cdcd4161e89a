# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compressed reductions with error feedback around a codec.

The unsent part of a rank's gradient is its residual, which is added to its next gradient (TAGC,
Algorithm 1). If steps may be skipped, a second residual replaces it when the step is accepted: the
values sent in a skipped step were not applied.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from torchtitan_lr.compat.fsdp import DefaultAllocMixin, ReduceScatter, reads_sums_at_once
from torchtitan_lr.compat.process_groups import reduce_scatter
from torchtitan_lr.compression.codecs import (
    CODECS,
    Resumable,
    Works,
    complete,
    exchange,
    gather,
    left_over,
    pack,
    unpack,
)
from torchtitan_lr.compression.exchange_overlap import ExchangeOverlap
from torchtitan_lr.compression.sizes import CodecSizes, Unit, returned_entries, sent_bytes

COUNTS = ("sent", "unpeeled", "indexed")  # the entries of `Compressor.counts`


@dataclass(frozen=True)
class Span:
    """Consecutive entries of one tensor, a parameter's gradient, in a flat buffer."""

    size: int
    compressed: bool


class Compressor(DefaultAllocMixin, ReduceScatter):
    """Reduces the gradients of one FSDP2 unit over W ranks and keeps the residual (W, m)."""

    def __init__(
        self,
        name: str,
        sizes: CodecSizes,
        spans: Sequence[Span],
        group: dist.ProcessGroup,
        device: torch.device,
        all_reduce: bool = False,
        revocable: bool = False,
        overlap: ExchangeOverlap | None = None,  # None ends each exchange before the call returns,
        module: FSDPModule | None = None,  # and so does None
    ) -> None:
        self.name, self.spans = name, tuple(spans)
        self.group, self.device, self.returns_all = group, device, all_reduce
        ranks, entries = group.size(), sum(span.size for span in spans)
        self.compressed_size = sum(span.size for span in spans if span.compressed)
        # Whether it compresses this rank's own gradients, not sums over the shards.
        self.takes_gradients = self.compressed_size > 0 and not all_reduce
        # A rank decodes its part, of an all-reduce a W-th of the entries, padded to equal sizes.
        owned = -(-self.compressed_size // ranks) if all_reduce else self.compressed_size
        self.unit = Unit(ranks, owned, entries - self.compressed_size)
        whole = sizes.value_bytes * entries * (1 if all_reduce else ranks)
        self.bytes_saved = whole - sent_bytes(self.unit, sizes, all_reduce)  # per exchange
        self.sizes, self.codec = sizes, CODECS[sizes.name](ranks, sizes)
        self.overlap = overlap or ExchangeOverlap(device)
        # The table of compressors, by module, must not keep the modules alive.
        self.module = None if module is None else ref(module)
        # Ends an exchange; the ledger attributes its collectives to this unit.
        self.resume: Callable[[Resumable[None], Works], None] = complete
        self.exchanges = 0
        self.measuring = False  # whether the next exchange also counts
        self.counts: Tensor | None = None  # the last ones, fp64 (3,)
        self.residual = torch.zeros(ranks, owned, dtype=torch.float32, device=device)
        # Written by an exchange; swapped with the residual by commit.
        self._spare = torch.empty_like(self.residual) if revocable else self.residual
        self._waits = False  # whether the spare one is the residual if the step is accepted

    def commit(self, rejected: Tensor | None = None) -> None:
        """Keep the residual of the exchanges since the last step, unless the step is rejected."""
        # ``rejected``, above 0 to discard it, is a scalar read on the device only; None keeps the
        # residual without a copy.
        if not self._waits:
            return
        self._waits = False
        if rejected is None:
            self.residual, self._spare = self._spare, self.residual
        else:
            torch.where(rejected > 0, self.residual, self._spare, out=self.residual)

    def __call__(  # FSDP2 waits only if it gets some work
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter the unit's gradients (W·s,), by rank, into this rank's sums (s,)."""
        if op != dist.ReduceOp.SUM or async_op:
            raise RuntimeError(f"compressed gradients are summed, synchronously; asked for {op}")
        if self.compressed_size:
            self._start(output_tensor, input_tensor)
        else:
            reduce_scatter(output_tensor, input_tensor, group=group)
        return None

    def all_reduce(self, shard: Tensor) -> None:
        """Sum the unit's shard (s,) over the replicas, in place."""
        if shard.device.type != "cpu":
            # FSDP2 allocates the shard on its reduce-scatter stream and calls the hook on its
            # all-reduce stream. It frees a shard that is stored in another dtype when the cast is
            # queued: the next unit's reduce-scatter could overwrite it while it is being summed.
            shard.record_stream(torch.get_device_module(shard.device).current_stream())
        self._start(shard, shard)

    def _start(self, sums: Tensor, gradients: Tensor) -> None:
        """Start an exchange that writes the sums; the gradients live until it has ended."""
        # The buffer has no marks: if a tensor were missing, all later ones would be read wrongly.
        expected = sum(span.size for span in self.spans)
        if sums.numel() != expected:
            raise RuntimeError(
                f"{self.name}: {sums.numel()} gradients a rank instead of {expected}: "
                "a tensor of this unit took no part in the step"
            )
        module = None if self.module is None else self.module()
        later = module is not None and not reads_sums_at_once(module, sums)
        self.overlap.run(self.sum_gradients(sums, gradients), self.resume, [sums, gradients], later)

    def sum_gradients(self, sums: Tensor, gradients: Tensor) -> Resumable[None]:
        """Reduce-scatter gradients (W·s,), by rank, or all-reduce a shard (s,), into sums (s,)."""
        if not self.compressed_size:
            yield [dist.all_reduce(sums, group=self.group, async_op=True)]
            return
        rows, dense = self._by_kind(gradients.view(-1, sums.numel()))  # (W, m), (W, e)
        # Sums over HSDP's shards may have travelled in bf16; a residual must not be added to them.
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.returns_all:  # a shard: W = 1
            size = self.unit.ranks * self.unit.compressed
            padded = pad(rows[0], (0, size - self.compressed_size))
            own, _ = yield from self.exchange_rows(padded.view(self.unit.ranks, -1))
            total = yield from self.spread(own)  # longer than m by the padding
            others = dense[0]
            if others.numel():
                yield [dist.all_reduce(others, group=self.group, async_op=True)]
        else:
            total, others = yield from self.exchange_rows(rows, dense)  # (m,), (e,)
        self._in_order(total, others, sums)

    def _by_kind(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the compressed gradients (W, m) and the others (W, e) out of the unit's (W, s)."""
        none = gradients[:, :0]
        compressed, others = [none], [none]
        parts = gradients.split([span.size for span in self.spans], dim=1)
        for span, part in zip(self.spans, parts, strict=True):
            (compressed if span.compressed else others).append(part)
        # Copies even of a single part, since an exchange overwrites its rows.
        return torch.cat(compressed, dim=1), torch.cat(others, dim=1)

    def _in_order(self, compressed: Tensor, others: Tensor, sums: Tensor) -> None:
        """Write the sums of both kinds into ``sums`` (s,), in the order of the unit's tensors."""
        pieces, left = [], {True: compressed, False: others}
        for span in self.spans:
            rest = left[span.compressed]
            pieces.append(rest[: span.size])
            left[span.compressed] = rest[span.size :]
        torch.cat(pieces, out=sums)

    def exchange_rows(
        self, rows: Tensor, dense: Tensor | None = None
    ) -> Resumable[tuple[Tensor, Tensor]]:
        """Reduce-scatter rows (W, m), overwritten, with error feedback, and dense ones (W, e)."""
        # If revocable, the residual changes only with the next `commit`. Until then each exchange
        # continues from the one before. The next one must not start before the end of this one.
        # The sums (m,) and (e,) are in bf16 if they travel so.
        # Collisions differ between steps. The 0 stands for a setting that left.
        seed = zlib.crc32(f"0/{self.name}/{self.exchanges}".encode())
        self.exchanges += 1
        # The residual of the exchange before, committed or not.
        pending = self._spare if self._waits else self.residual
        rows += pending
        message = self.codec.encode(rows, seed)
        if dense is not None and dense.numel():
            message.summed["dense"] = dense.bfloat16() if self.sizes.half else dense
        received = yield from exchange(message, self.group)
        decoded = self.codec.decode(received, rows.shape[1], seed)
        failed = None
        if decoded.failed is not None:
            failed = yield from gather(decoded.failed, self.group)
        unsent = left_over(rows, message, failed)
        total = decoded.total
        if self.returns_all and self.sizes.half:
            # The sums go back in bf16 too, and their owner owes what that rounds off.
            total = total.bfloat16()
            unsent[self.group.rank()] += decoded.total - total
        # A NaN or infinity is among the largest entries, so it is sent and the step is skipped. In
        # the residual it would ruin all later steps, so the old residual stays.
        self._spare.copy_(torch.where(unsent.isfinite(), unsent, pending))
        self._waits = self._spare is not self.residual
        if self.measuring:
            counts = {"sent": message.values.count_nonzero(), **decoded.counts}
            zero = torch.zeros((), device=rows.device)
            # fp64 holds counts of more than 2²⁴ entries exactly.
            self.counts = torch.stack([counts.get(name, zero).double() for name in COUNTS])
        return total, received.get("dense", rows.new_empty(0))

    def spread(self, total: Tensor) -> Resumable[Tensor]:
        """Return all ranks' sums (m,) on every rank, bitwise equal: (W·m,)."""
        # They are sent as bitmap and values if that is smaller.
        w, m = self.unit.ranks, self.unit.compressed
        sent = returned_entries(self.unit, self.sizes)
        if sent == m:
            return (yield from gather(total, self.group)).flatten()
        marked = total != 0
        positions = marked.nonzero_static(size=sent, fill_value=m).flatten()
        index = yield from gather(pack(marked), self.group)
        # Index m is padding.
        values = yield from gather(pad(total, (0, 1))[positions], self.group)
        marks = unpack(index, m)
        # Each row gets marks behind its end, up to `sent` in all: then all rows have equally many,
        # and their positions are found at once, in as many kernels for any number of ranks.
        missing = sent - marks.sum(1, keepdim=True)
        filled = torch.cat([marks, torch.arange(sent, device=total.device) < missing], 1)
        places = filled.flatten().nonzero_static(size=w * sent).view(w, sent) % (m + sent)
        whole = total.new_zeros(w, m + 1).scatter_(1, places.clamp(max=m), values)
        return whole[:, :m].flatten()
