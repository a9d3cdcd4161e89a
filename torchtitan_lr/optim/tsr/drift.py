# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whether replicas computed the same bases, and what makes them equal again.

A refresh is computed by every replica for itself. Replicas on equal machines never differ, but one
refresh with other bases would let them part for good.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.numerics import HostCopy, blocks
from torchtitan_lr.titan import logger

CHECKED = 2**18
"""Words of a checksum that are cast at a time."""


class Matrix(NamedTuple):
    """A matrix with new bases."""

    name: str
    """The parameter's name."""
    state: list[Tensor]
    """All that depends on the bases: weight, U, V and moments on this rank, changed in place."""


class Drift:
    """Compares what replicas compute, and gives all of them the first one's if it differs."""

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self._replicas = replicas
        self._compared: list[tuple[Sequence[Matrix], HostCopy]] = []

    def compare(self, matrices: Sequence[Matrix], computed: Sequence[Sequence[Tensor]]) -> None:
        """Compare on the device what each replica has computed for each of some matrices."""
        if self._replicas is not None:
            # `repair` reads the result: here the host would wait for the device.
            differ = HostCopy(differences(computed, self._replicas))
            self._compared.append((matrices, differ))

    def repair(self) -> None:
        """Give all replicas the first one's state of the matrices that differed.

        Only this state can differ between replicas: cores, dense gradients and the norm are sums
        over the replicas. So all replicas go on as if they had used the first one's bases.
        """
        compared, self._compared = self._compared, []
        for matrices, differ in compared:
            drifted = [m for m, wrong in zip(matrices, differ.read(), strict=True) if wrong]
            for matrix in drifted:
                for tensor in matrix.state:
                    sent = tensor.contiguous()
                    dist.broadcast(sent, group_src=0, group=self._replicas)
                    tensor.copy_(sent)
            if drifted:
                logger.warning(
                    "Replicas computed different bases for %s; the first replica's are used",
                    ", ".join(matrix.name for matrix in drifted),
                )


def differences(batches: Sequence[Sequence[Tensor]], replicas: dist.ProcessGroup) -> Tensor:
    """Return, per batch (n,), whether any bit of the tensors that each replica computed differs.

    One all-reduce of two checksums per batch tells all replicas.
    """
    weights = torch.arange(1, CHECKED + 1, device=batches[0][0].device)
    products = torch.empty_like(weights)
    checksums = torch.stack([checksum(batch, weights, products) for batch in batches])
    extremes = torch.cat([checksums, -checksums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replicas)
    high, low = extremes.view(2, -1)
    return high != -low


def checksum(tensors: Sequence[Tensor], weights: Tensor, products: Tensor) -> Tensor:
    """Return a number in [0, 2⁶²), int64, that every bit of some tensors and its place change.

    They are in fp32 or fp64. ``weights`` (n,) are those of the 32-bit words of a block, and
    ``products`` (n,) is memory, both int64: the tensors are cast a block at a time.
    """
    total = weights.new_zeros(())
    for tensor in tensors:
        for block in blocks(tensor, len(weights) // 2):
            bits = block.contiguous().view(-1).view(torch.int32)
            terms = products[: len(bits)].copy_(bits).mul_(weights[: len(bits)])
            # By the weights swapped entries show, by the factor swapped blocks; int64 wraps.
            total.mul_(1_000_003).add_(terms.sum())
    # Below 2⁶², the number's negative is in int64's range too.
    return total.remainder(2**62)
