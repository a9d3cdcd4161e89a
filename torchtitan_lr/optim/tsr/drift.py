# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whether replicas computed the same bases, and what makes them equal again.

A refresh is computed by every replica for itself. Replicas on equal machines never differ, but one
refresh with other bases would let them part for good.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.numerics import HostCopy
from torchtitan_lr.titan import logger


class Drift:
    """Compares what replicas compute, and gives all of them the first one's if it differs."""

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self._replicas = replicas
        self._compared: list[tuple[Mapping[str, Sequence[Tensor]], HostCopy]] = []

    def compare(
        self, states: Mapping[str, Sequence[Tensor]], computed: Iterable[Sequence[Tensor]]
    ) -> None:
        """Compare on the device what each replica has computed for each of some matrices.

        One all-reduce of two checksums per matrix tells all replicas. ``states`` has by name all
        that depends on the bases on this rank: weight, U, V and moments.
        """
        if self._replicas is None:
            return
        checksums = torch.stack([checksum(tensors) for tensors in computed])
        extremes = torch.cat([checksums, -checksums])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._replicas)
        high, low = extremes.view(2, -1)
        # `repair` reads the result: here the host would wait for the device.
        self._compared.append((states, HostCopy(high != -low)))

    def repair(self) -> None:
        """Give all replicas the first one's state of the matrices that differed.

        Only this state can differ between replicas: cores, dense gradients and the norm are sums
        over the replicas. So all replicas go on as if they had used the first one's bases.
        """
        compared, self._compared = self._compared, []
        for states, differ in compared:
            drifted = [n for n, wrong in zip(states, differ.read(), strict=True) if wrong]
            for tensor in chain.from_iterable(states[name] for name in drifted):
                sent = tensor.contiguous()
                dist.broadcast(sent, group_src=0, group=self._replicas)
                tensor.copy_(sent)
            if drifted:
                logger.warning(
                    "Replicas computed different bases for %s; the first replica's are used",
                    ", ".join(drifted),
                )


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number in [0, 2⁶²), int64, that every bit of some tensors and its place change.

    They are in fp32 or fp64.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        words = tensor.contiguous().view(-1).view(torch.int32)
        places = torch.arange(1, len(words) + 1, device=words.device)
        # By the places swapped entries show, by the factor swapped tensors; int64 wraps.
        total.mul_(1_000_003).add_((words * places).sum())
    # Below 2⁶², the number's negative is in int64's range too.
    return total.remainder(2**62)
