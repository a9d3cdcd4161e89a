# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Collectives of TSR-Adam: coalesced sums, and rounds shared by many decompositions.

Every reduction is a plain SUM: the loss is already divided by the tokens of the global batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.optim.tsr.layout import Layout
from torchtitan_lr.optim.tsr.randomized_svd import Answer, Gather, Request, Steps, Sum


@dataclass(frozen=True)
class ReductionGroups:
    """The process groups of a run.

    Args:
        sharding: Mesh dimensions that split parameters, by name, in the run's common order.
        replicas: Ranks with equal parameters and different data; None if there is only one.
        stages: Pipeline ranks; None without pipelining.
    """

    sharding: Mapping[str, dist.ProcessGroup]
    replicas: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None

    @property
    def shards(self) -> list[dist.ProcessGroup]:
        """Return the sharding groups in order."""
        return list(self.sharding.values())

    @property
    def sizes(self) -> list[int]:
        """Return the number of ranks of every sharding dimension."""
        return [group.size() for group in self.shards]


class PendingSum:
    """An asynchronous all-reduce of several tensors in one message.

    Args:
        tensors: Summed in place by `wait`.
        group: The ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._tensors = list(tensors)
        first = self._tensors[0]
        if len(self._tensors) == 1 and first.is_contiguous():
            self._wire = first
        else:
            self._wire = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        self._work = dist.all_reduce(self._wire, group=group, async_op=True)

    def wait(self) -> None:
        """Wait, and copy the sums into the tensors."""
        assert self._work is not None
        self._work.wait()
        if self._wire is not self._tensors[0]:
            parts = self._wire.split([tensor.numel() for tensor in self._tensors])
            views = [part.view(t.shape) for part, t in zip(parts, self._tensors, strict=True)]
            torch._foreach_copy_(self._tensors, views)


def sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors of one dtype in place over a group, in one call; do nothing without either."""
    if group is not None and tensors:
        PendingSum(tensors, group).wait()


def solve_together(
    computations: Sequence[Steps[Any]], layouts: Sequence[Layout], groups: ReductionGroups
) -> list[Any]:
    """Run computations side by side and merge each round of their requests into collectives.

    Args:
        computations: In the same order on all ranks.
        layouts: The layout of each computation's matrices.
        groups: The process groups.
    """
    results: list[Any] = [None] * len(computations)
    answers: dict[int, Answer] = dict.fromkeys(range(len(computations)))
    while answers:
        requests: dict[int, Request] = {}
        for index, answer in answers.items():
            try:
                requests[index] = computations[index].send(answer)
            except StopIteration as end:
                results[index] = end.value
        answers = _answer(requests, layouts, groups)
    return results


def _answer(
    requests: Mapping[int, Request], layouts: Sequence[Layout], groups: ReductionGroups
) -> dict[int, Answer]:
    """Run one round: at most one call per kind of request and mesh dimension."""
    sums = {i: request for i, request in requests.items() if isinstance(request, Sum)}
    for dim, group in enumerate(groups.shards):
        split = [s.tensor for i, s in sums.items() if dim in getattr(layouts[i], s.axis)]
        sum_over(split, group)
    sum_over([s.tensor for s in sums.values() if s.replicas], groups.replicas)
    answers: dict[int, Answer] = {i: request.tensor for i, request in sums.items()}
    gathers = {i: request for i, request in requests.items() if isinstance(request, Gather)}
    answers |= dict.fromkeys(gathers)
    for dim, group in enumerate(groups.shards):
        concerned = {
            i: request.tensor
            for i, request in gathers.items()
            if request.mesh_dim == dim and dim in getattr(layouts[i], request.axis)
        }
        answers |= _gather(concerned, group)
    return answers


def _gather(tensors: Mapping[int, Tensor], group: dist.ProcessGroup) -> dict[int, Answer]:
    if not tensors:
        return {}
    own = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    everyone = own.new_empty(group.size() * own.numel())
    dist.all_gather_into_tensor(everyone, own, group=group)
    parts = everyone.view(group.size(), -1).split([t.numel() for t in tensors.values()], dim=1)
    return {
        index: (part.reshape(group.size(), *tensor.shape), group.rank())
        for (index, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def repair_drift(
    batches: Sequence[Sequence[Tensor]], replicas: dist.ProcessGroup | None
) -> list[int]:
    """Detect differences between replicas in tensors that each computed itself, and repair them.

    One all-reduce of two checksums per batch detects a difference in any bit. The first replica's
    tensors then replace the others'.

    Args:
        batches: Groups of tensors; corrected in place.
        replicas: The replicas.

    Returns:
        Indices of the batches that differed, the same on all replicas.
    """
    if replicas is None or not batches:
        return []
    checksums = [torch.stack([_checksum(tensor) for tensor in batch]) for batch in batches]
    sums = torch.stack([of_batch.sum().remainder(2**62) for of_batch in checksums])
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replicas)
    high, low = extremes.view(2, -1)
    wrong: list[int] = (high != -low).nonzero().flatten().tolist()
    for index in wrong:
        for tensor in batches[index]:
            dist.broadcast(tensor, group_src=0, group=replicas)
    return wrong


def _checksum(tensor: Tensor) -> Tensor:
    """Return a weighted sum of a tensor's bits as integers; int64 wraps around."""
    bits = tensor.contiguous().view(-1).view(torch.int32).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device).remainder_(8191).add_(1)
    return (bits * weights).sum()


def squared_norm(
    pieces: Sequence[tuple[Tensor, Sequence[int]]], groups: ReductionGroups, device: torch.device
) -> Tensor:
    """Sum the squares of tensors that are split over the mesh, each element once, in fp64.

    Args:
        pieces: This rank's parts, already summed over the replicas, each with the mesh dimensions
            that shard it. Along the other dimensions all ranks hold the same part.
        groups: The process groups; pipeline stages hold different parameters.
        device: Device of the result.

    Returns:
        A scalar, equal on all ranks.
    """
    places = [group.rank() for group in groups.shards]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part, dims in pieces:
        if all(place == 0 or dim in dims for dim, place in enumerate(places)):
            total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    for group in (*groups.shards, groups.stages):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total
