# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a TSR-Adam step sends, and when.

FSDP sums gradients over the shards only; TSR-Adam sums over the replicas itself. Every reduction is
a plain SUM. Sums over the replicas may travel in bf16; terms of a core or a sketch that shards of
one matrix add up stay as they are.

A refresh is computed by every replica for itself, unless ``tsr_share_refresh``. Replicas on equal
machines never differ, but one refresh with other bases would let them part for good: `Drift` makes
them equal again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.dtensor import shard_dims
from torchtitan_lr.numerics import HostCopy
from torchtitan_lr.titan import logger


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of a run."""

    sharding: Mapping[str, dist.ProcessGroup]
    """Mesh dimensions that split parameters, by name, in the run's common order."""
    replicas: dist.ProcessGroup | None = None
    """Ranks with equal parameters and different data; None if there is only one."""
    stages: dist.ProcessGroup | None = None  # pipeline ranks; None without pipelining
    wire_dtype: torch.dtype | None = None
    """Dtype in which sums over the replicas travel; None for the tensors' own."""

    @classmethod
    def of(cls, parameters: Iterable[Tensor], **others: Any) -> "ProcessGroups":
        """Read the mesh dimensions of more than one rank from parameters; the others as above."""
        sharding: dict[str, dist.ProcessGroup] = {}
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                for dim, name in enumerate(mesh.mesh_dim_names or ()):
                    if mesh.size(dim) > 1:
                        sharding.setdefault(name, mesh.get_group(dim))
        return cls(sharding, **others)

    def splitting(self, parameter: Tensor, dim: int) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups whose ranks split a dimension of a parameter."""
        known = list(self.sharding.values())
        return tuple(known[place] for place in shard_dims(parameter, dim, self.sharding))

    def sum_over_replicas(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Start the sum of tensors over the replicas, see `sum_over`."""
        return sum_over(tensors, self.replicas, self.wire_dtype)


def sum_over(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    wire_dtype: torch.dtype | None = None,
) -> Callable[[], None]:
    """Start the sum of tensors of one dtype over a group, in one message; return what waits for it.

    The sums are copied into the tensors. The message has their dtype, or another one.
    """
    if group is None or not tensors:
        return lambda: None
    first = tensors[0]
    dtype = wire_dtype or first.dtype
    is_message = len(tensors) == 1 and first.is_contiguous() and first.dtype == dtype
    message = first if is_message else torch.cat([t.reshape(-1).to(dtype) for t in tensors])
    work = dist.all_reduce(message, group=group, async_op=True)

    def wait() -> None:
        assert work is not None
        work.wait()
        if message is not first:
            parts = message.split([tensor.numel() for tensor in tensors])
            views = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
            torch._foreach_copy_(list(tensors), views)

    return wait


def summed(terms: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Sum terms in place over each group, and return them."""
    for group in groups:
        sum_over([terms], group)()
    return terms


class Sum(NamedTuple):
    """A sum that may start during backward."""

    parameters: Sequence[Tensor]  # those whose gradients it needs
    start: Callable[[], Callable[[], None]]  # starts it, and returns what waits for it


class EarlySums:
    """The sums of one step: each starts when all its gradients are there, in a fixed order.

    Autograd may produce gradients in another order on another rank. A sum therefore waits for all
    sums before it, in the order in which backward is expected to produce all gradients.
    """

    def __init__(self, sums: Sequence[Sum], order: Sequence[Tensor]) -> None:
        position = {parameter: index for index, parameter in enumerate(order)}
        in_turn = sorted(sums, key=lambda one: max(position[p] for p in one.parameters))
        self._waiting = deque((one, set(one.parameters)) for one in in_turn)  # and what is missing
        # The parameters whose sums have started: they take no other gradient.
        self.started: set[Tensor] = set()
        self._pending: list[Callable[[], None]] = []

    def ready(self, parameter: Tensor) -> None:
        """Mark a parameter whose gradient is complete, and start the sums that are complete."""
        for _, missing in self._waiting:
            missing.discard(parameter)
        while self._waiting and not self._waiting[0][1]:
            self._start_next()

    def start_all(self) -> None:
        """Start the other sums too: whatever is not marked has no gradient on this rank."""
        while self._waiting:
            self._start_next()

    def wait(self) -> None:
        """Wait for all sums that have started."""
        for wait in self._pending:
            wait()
        self._pending.clear()

    def _start_next(self) -> None:
        one, _ = self._waiting.popleft()
        self.started.update(one.parameters)
        self._pending.append(one.start())


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
        checksums = torch.stack([_checksum(tensors) for tensors in computed])
        extremes = torch.cat([checksums, -checksums])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._replicas)
        high, low = extremes.view(2, -1)
        # `repair` reads the result: here the host would wait for the device.
        self._compared.append((states, HostCopy(high != -low)))

    def repair(self, used: bool = True) -> None:
        """Give all replicas the first one's state of the matrices that differed, if it is used.

        Only this state can differ between replicas: cores, dense gradients and the norm are sums
        over the replicas. So all replicas go on as if they had used the first one's bases.
        """
        compared, self._compared = self._compared, []
        for states, differ in compared if used else ():
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


def _checksum(tensors: Sequence[Tensor]) -> Tensor:
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
