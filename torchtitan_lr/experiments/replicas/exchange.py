# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers and short records of a step, exchanged between replicas and between a replica's ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LostReplicaError(RuntimeError):
    """A collective of this step failed: a replica has left, hangs, or aborted the step."""


class NumberSum:
    """A sum of numbers over all ranks of all members, in fp64; it starts at once."""

    def __init__(self, group: Any, numbers: list[float]) -> None:
        self._sums = torch.tensor(numbers, dtype=torch.float64)
        self._work: Any = dist.all_reduce(self._sums, group=group, async_op=True)

    def of_group(self) -> list[float]:
        """Return the sums over the ranks of this number; call it before `wait`."""
        self._work.wait()
        return [float(number) for number in self._sums.tolist()]

    def wait(self) -> list[float]:
        """Return the sums, undefined if the group has failed; call it on all ranks of a replica."""
        self._work.wait()
        if dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
        return [float(number) for number in self._sums.tolist()]


def gather_bytes(group: Any, payload: bytes) -> list[bytes]:
    """Return the payloads of the members' ranks of this rank's number, in the order of members.

    Two sums carry them, since payloads differ in length and gloo's gather needs equal ones.

    Raises:
        LostReplicaError: A collective failed.
    """
    lengths = torch.zeros(len(group.replicas), dtype=torch.int64)
    lengths[group.place] = len(payload)
    _sum(lengths, group)
    table = torch.zeros(len(group.replicas), int(lengths.max()), dtype=torch.uint8)
    table[group.place, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    with group.of_agreed_size():
        _sum(table, group)
    rows = zip(table, lengths.tolist(), strict=True)
    return [row[:length].numpy().tobytes() for row, length in rows]


def least_of_ranks(*numbers: int) -> list[int]:
    """Return the smallest value of each number among the ranks of this replica."""
    least = torch.tensor(numbers, dtype=torch.int64)
    if dist.get_world_size() > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return [int(number) for number in least.tolist()]


def from_first_rank(value: Any) -> Any:
    """Return the first rank's value on all ranks of this replica."""
    values = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def joined_ranks(text: str) -> str:
    """Return the texts of all ranks of this replica, joined."""
    texts = [text]
    if dist.get_world_size() > 1:
        texts *= dist.get_world_size()
        dist.all_gather_object(texts, text)
    return "-".join(texts)


def _sum(tensor: Tensor, group: Any) -> None:
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    if group.failure is not None:
        raise LostReplicaError(str(group.failure)) from group.failure
