# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compressed reductions with error feedback around a codec.

The unsent part of a rank's gradient is its residual, which is added to its next gradient (TAGC,
Algorithm 1). If steps may be skipped, a second residual replaces it when the step is accepted: the
values sent in a skipped step were not applied.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from torchtitan_lr.compat.autograd import after_backward, backward_number
from torchtitan_lr.compat.fsdp import DefaultAllocMixin, ReduceScatter, reads_sums_at_once
from torchtitan_lr.compat.process_groups import gathered, reduce_scatter
from torchtitan_lr.compression.codecs import Codec, exchange, left_over, pack, unpack
from torchtitan_lr.compression.settings import Unit, returned_entries, sent_bytes

COUNTS = ("sent", "unpeeled", "indexed")  # the entries of `Compressor.counts`


class ExchangeStream:
    """The stream of a model's exchanges on an accelerator: decoding must not hold up backward."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._ended = self._stream.record_event()  # at the end of the last exchange
        self._backward: int | None = None  # the backward pass that waits for it at its end

    def run(self, call: Callable[[], None], tensors: Sequence[Tensor], may_wait: bool) -> None:
        """Queue an exchange of tensors of other streams; its caller waits for it unless it may."""
        number = backward_number()
        may_wait = may_wait and number is not None
        if may_wait and number != self._backward:
            after_backward(self._end)
            self._backward = number
        caller = self._module.current_stream()
        # FSDP2 frees a unit's buffers when its stream has passed this point, and backward waits for
        # that stream one unit later: so at most two exchanges hold memory.
        caller.wait_event(self._ended)
        self._stream.wait_stream(caller)
        with self._module.stream(self._stream):
            call()
            self._ended = self._stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        if not may_wait:
            caller.wait_event(self._ended)

    def _end(self) -> None:
        """Make the results visible to what follows backward."""
        self._backward = None
        self._module.current_stream().wait_event(self._ended)


class Compressor(DefaultAllocMixin, ReduceScatter):
    """Reduces the gradients of one FSDP2 unit over W ranks and keeps the residual (W, m)."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        # The entries of each of the unit's tensors, in order, and whether they are compressed.
        spans: Sequence[tuple[int, bool]],
        group: dist.ProcessGroup,
        device: torch.device,
        all_reduce: bool = False,
        revocable: bool = False,
        stream: ExchangeStream | None = None,  # None runs each exchange where it is called
        module: FSDPModule | None = None,
    ) -> None:
        self.name, self.codec, self.spans = name, codec, tuple(spans)
        self.group, self.device, self.returns_all = group, device, all_reduce
        ranks, self.entries = codec.ranks, sum(size for size, _ in spans)
        self.compressed_size = sum(size for size, compressed in spans if compressed)
        # Whether it compresses this rank's own gradients, not sums over the shards.
        self.takes_gradients = self.compressed_size > 0 and not all_reduce
        # What a rank decodes: of an all-reduce a W-th of the entries, padded to equal sizes.
        m = -(-self.compressed_size // ranks) if all_reduce else self.compressed_size
        self.unit = Unit(ranks, m, self.entries - self.compressed_size)
        whole = (2 if codec.half else 4) * self.entries * (1 if all_reduce else ranks)
        self.bytes_saved = whole - sent_bytes(self.unit, codec, all_reduce)  # per exchange
        self.stream = stream
        # The table of compressors, by module, must not keep the modules alive.
        self.module = None if module is None else ref(module)
        self.exchanges = 0
        self.measuring = False  # whether the next exchange also counts
        self.counts: Tensor | None = None  # the last ones, fp64 (3,)
        self.residual = torch.zeros(ranks, m, dtype=torch.float32, device=device)
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
        # The buffer has no marks: if a tensor were missing, all later ones would be read wrongly.
        if sums.numel() != self.entries:
            raise RuntimeError(
                f"{self.name}: {sums.numel()} gradients a rank instead of {self.entries}: "
                "a tensor of this unit took no part in the step"
            )
        if self.stream is None:
            self.sum_gradients(sums, gradients)
            return
        module = None if self.module is None else self.module()
        may_wait = module is not None and not reads_sums_at_once(module, sums)
        tensors = [sums, gradients]
        self.stream.run(lambda: self.sum_gradients(sums, gradients), tensors, may_wait)

    def sum_gradients(self, sums: Tensor, gradients: Tensor) -> None:
        """Reduce-scatter gradients (W·s,), by rank, or all-reduce a shard (s,), into sums (s,)."""
        if not self.compressed_size:
            dist.all_reduce(sums, group=self.group)
            return
        rows, dense = self._by_kind(gradients.view(-1, self.entries))
        # Sums over HSDP's shards may have travelled in bf16; a residual must not be added to them.
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.returns_all:
            total, others = self._all_reduced(rows[0]), dense[0]
            if others.numel():
                dist.all_reduce(others, group=self.group)
        else:
            total, others = self.exchange_rows(rows, dense)
        pieces, left = [], {True: total, False: others}  # (m,), or longer by padding, and (e,)
        for size, compressed in self.spans:
            pieces.append(left[compressed][:size])
            left[compressed] = left[compressed][size:]
        torch.cat(pieces, out=sums)

    def _by_kind(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the compressed gradients (W, m) and the others (W, e) out of the unit's (W, s)."""
        kinds = {True: [gradients[:, :0]], False: [gradients[:, :0]]}
        tensors = gradients.split([size for size, _ in self.spans], dim=1)
        for (_, compressed), tensor in zip(self.spans, tensors, strict=True):
            kinds[compressed].append(tensor)
        # Copies even of a single tensor, since an exchange overwrites its rows.
        return torch.cat(kinds[True], dim=1), torch.cat(kinds[False], dim=1)

    def _all_reduced(self, shard: Tensor) -> Tensor:
        """Return the sums of a shard (m,) on every rank, with padding: (W·⌈m/W⌉,)."""
        ranks, entries = self.unit.ranks, self.unit.compressed
        padded = pad(shard, (0, ranks * entries - len(shard)))
        own, _ = self.exchange_rows(padded.view(ranks, entries))
        return self.spread(own)

    def exchange_rows(self, rows: Tensor, dense: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Reduce-scatter rows (W, m), overwritten, with error feedback, and dense ones (W, e).

        Row i goes to rank i. The sums (m,) and (e,) are in bf16 if they travel so.
        """
        # 1. Add what the exchange before left unsent (W, m), committed or not.
        owed = self._spare if self._waits else self.residual
        rows += owed
        # 2. Send. Collisions differ between units and steps.
        seed = zlib.crc32(f"0/{self.name}/{self.exchanges}".encode())
        self.exchanges += 1
        message = self.codec.encode(rows, seed)
        if dense is not None and dense.numel():
            message.summed["dense"] = dense.bfloat16() if self.codec.half else dense
        received = exchange(message, self.group)
        # 3. Decode this rank's sums (m,). Hear of all owners which of their blocks failed (W, v).
        decoded = self.codec.decode(received, rows.shape[1], seed)
        failed = None if decoded.failed is None else gathered(decoded.failed, self.group)
        # 4. Find what this rank owes now (W, m).
        unsent = left_over(rows, message, failed)
        total = decoded.total
        if self.returns_all and self.codec.half:
            # The sums go back in bf16 too, and their owner owes what that rounds off.
            total = total.bfloat16()
            unsent[self.group.rank()] += decoded.total - total
        self._owe(unsent, owed)
        if self.measuring:
            counts = {"sent": message.values.count_nonzero(), **decoded.counts}
            zero = torch.zeros((), device=rows.device)
            # fp64 holds counts of more than 2²⁴ entries exactly.
            self.counts = torch.stack([counts.get(name, zero).double() for name in COUNTS])
        return total, received.get("dense", rows.new_empty(0))

    def _owe(self, unsent: Tensor, before: Tensor) -> None:
        """Make what is unsent the residual, at once or with the next `commit`."""
        # A NaN or infinity is among the largest entries, so it is sent and the step is skipped. In
        # the residual it would ruin all later steps, so there the residual before stays.
        self._spare.copy_(torch.where(unsent.isfinite(), unsent, before))
        self._waits = self._spare is not self.residual

    def spread(self, total: Tensor) -> Tensor:
        """Return all ranks' sums (m,) on every rank, bitwise equal: (W·m,)."""
        # They are sent as bitmap and values if that is smaller.
        m = self.unit.compressed
        sent = returned_entries(m, self.codec)
        if sent == m:
            return gathered(total, self.group).flatten()
        marked = total != 0
        positions = marked.nonzero_static(size=sent, fill_value=m).flatten()
        marks = unpack(gathered(pack(marked), self.group), m)
        # Index m is padding.
        values = gathered(pad(total, (0, 1))[positions], self.group)
        places = marks.cumsum(1) - 1  # of each marked entry among the values (W, m)
        return torch.where(marks, values.gather(1, places.clamp(min=0)), 0).flatten()
