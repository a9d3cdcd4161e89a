# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Exchanges of a gradient codec inside one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs import Codec, Message, left_over


def exchange_in_process(messages: Sequence[Message]) -> list[dict[str, Tensor]]:
    """Return what `exchange` returns on W ranks, for W messages in one process."""
    first = messages[0]
    received: list[dict[str, Tensor]] = []
    for owner in range(len(messages)):
        swapped = {n: torch.stack([x.swapped[n][owner] for x in messages]) for n in first.swapped}
        summed = {n: _sum([x.summed[n][owner] for x in messages]) for n in first.summed}
        received.append(swapped | summed)
    return received


def reduce_in_process(
    codec: Codec, rows: Tensor, seed: int
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Reduce the rows of W ranks inside one process, in the same phases."""
    messages = [codec.encode(own.clone(), seed) for own in rows]
    decoded = [codec.decode(x, rows.shape[-1], seed) for x in exchange_in_process(messages)]
    failed = [x.failed for x in decoded if x.failed is not None]
    gathered = torch.stack(failed) if failed else None
    unsent = [left_over(o.clone(), x, gathered) for o, x in zip(rows, messages, strict=True)]
    totals = torch.stack([x.total for x in decoded])
    return totals, torch.stack(unsent), [x.counts for x in decoded]


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part  # keeps uint8 like the collective; Tensor.sum would widen it
    return total
