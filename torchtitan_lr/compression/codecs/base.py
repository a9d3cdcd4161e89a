# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The messages of a gradient codec, and their exchange.

A reduction of W rows has four phases, each without a host synchronisation:

1. the codec's ``encode`` converts this rank's rows to tensors for all-to-all and reduce-scatter;
2. `exchange` runs the collectives;
3. its ``decode`` returns the owner's sum and its failed blocks (None if it cannot fail);
4. `left_over`, after a `gather` of these verdicts, returns this rank's residual.

A row's sum plus its residuals on all ranks equals the sum of the inputs.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.compat.collectives import all_gather, reduce_scatter


@dataclass
class Message:
    """The tensors that one rank sends in one exchange.

    Args:
        positions: Sent entries (W, k) of every row.
        values: Their values (W, k).
        swapped: Tensors (W, a): row i goes to rank i as it is (all-to-all).
        summed: Tensors (W, a): row i is summed over ranks at rank i (reduce-scatter).
    """

    positions: Tensor
    values: Tensor
    swapped: dict[str, Tensor] = field(default_factory=dict)
    summed: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Decoded:
    """An owner's result of an exchange.

    Args:
        total: Sum over ranks of the sent entries (m,); zero in failed blocks.
        verdict: Packed bits (v,), one per block of consecutive entries, set if it failed; None if
            the codec cannot fail.
        counts: Numbers for the metrics, scalar tensors by name.
    """

    total: Tensor
    verdict: Tensor | None = None
    counts: dict[str, Tensor] = field(default_factory=dict)


Works = list[dist.Work]
"""Started collectives."""

Result = TypeVar("Result")
Steps = Generator[Works, None, Result]
"""A computation that starts collectives, yields them, and is resumed when they are done."""


def complete(steps: Steps[Result], works: Works | None = None) -> Result:
    """Run such a computation to its end, after the collectives that it has started already."""
    while True:
        for work in works or ():
            work.wait()
        try:
            works = next(steps)
        except StopIteration as end:
            return cast(Result, end.value)


def exchange(message: Message, group: dist.ProcessGroup) -> Steps[dict[str, Tensor]]:
    """Run a message's collectives: one all-to-all per tensor, one reduce-scatter for all sums."""
    received, works = {}, []
    for name, tensor in message.swapped.items():
        received[name] = torch.empty_like(tensor)
        works.append(dist.all_to_all_single(received[name], tensor, group=group, async_op=True))
    if message.summed:
        parts = list(message.summed.values())
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        own = whole.new_empty(whole.shape[1])
        works.append(reduce_scatter(own, whole.flatten(), group=group, async_op=True))
        sizes = [part.shape[1] for part in parts]
        received |= dict(zip(message.summed, own.split(sizes), strict=True))
    yield works
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Steps[Tensor]:
    """Return every rank's tensor (a,) as rows (W, a)."""
    rows = tensor.new_empty(group.size() * tensor.numel())
    yield [all_gather(rows, tensor.contiguous(), group=group, async_op=True)]
    return rows.view(group.size(), -1)
