# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers and short records that the members of a step exchange over their group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_numbers(group: Any, numbers: list[float]) -> list[float]:
    """Return numbers summed over the members, in fp64.

    Args:
        group: The `ReplicaGroup`.
        numbers: This replica's.

    Raises:
        LostReplicaError: The collective failed.
    """
    sums = torch.tensor(numbers, dtype=torch.float64)
    _sum(sums, group)
    return [float(number) for number in sums.tolist()]


def gather_bytes(group: Any, payload: bytes) -> list[bytes]:
    """Return the payloads of all members, in the order of their ranks.

    Two sums carry them, since payloads differ in length and gloo's gather needs equal ones.

    Args:
        group: The `ReplicaGroup`.
        payload: This replica's.

    Raises:
        LostReplicaError: A collective failed.
    """
    lengths = torch.zeros(len(group.replicas), dtype=torch.int64)
    lengths[group.place] = len(payload)
    _sum(lengths, group)
    table = torch.zeros(len(group.replicas), int(lengths.max()), dtype=torch.uint8)
    table[group.place, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    _sum(table, group)
    rows = zip(table, lengths.tolist(), strict=True)
    return [row[:length].numpy().tobytes() for row, length in rows]


def _sum(tensor: Tensor, group: Any) -> None:
    """Sum a tensor in place.

    A synchronous call would raise from within torch, which then describes the group in a log
    record and fails at that.
    """
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
