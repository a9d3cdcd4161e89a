# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sums that start during backward, in an order that is the same on all ranks."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torchtitan_lr.optim.tsr.mesh_sync import PendingSum

Place = tuple[int, int]
"""A parameter: number of its stack and index in it, or `DENSE` and its index."""

DENSE = -1
"""Stands for the number of a stack in the `Place` of a parameter that is not compressed."""


class EarlySums:
    """The sums of one step: each starts when all its gradients are there, in a fixed order.

    Autograd may produce gradients in another order on another rank. A bucket therefore waits for
    all buckets before it.

    Args:
        buckets: The parameters of each sum.
        order: Every parameter, in the order in which backward is expected to produce gradients.
        start: Starts the sum of a bucket, given its number; returns what to wait for.
        early: Whether sums may start before `start_rest`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Place]],
        order: Sequence[Place],
        start: Callable[[Sequence[Place]], Iterable[PendingSum]],
        early: bool,
    ) -> None:
        position = {place: index for index, place in enumerate(order)}
        self._buckets = sorted(buckets, key=lambda bucket: max(position[p] for p in bucket))
        self._missing = [set(bucket) for bucket in self._buckets]
        self._number = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._start, self._early = start, early
        self._started = 0
        self._pending: list[PendingSum] = []

    def has_started(self, place: Place) -> bool:
        """Return whether the sum with a parameter has started: it takes no other gradient."""
        return self._number.get(place, self._started) < self._started

    def ready(self, place: Place) -> None:
        """Mark a parameter whose gradient is complete; start the sums that are complete."""
        if place in self._number:
            self._missing[self._number[place]].discard(place)
        while self._early and self._started < len(self._buckets):
            if self._missing[self._started]:
                return
            self._start_next()

    def start_rest(self) -> None:
        """Start all other sums; a parameter that is not marked has no gradient."""
        while self._started < len(self._buckets):
            self._start_next()

    def wait(self) -> None:
        """Wait for all sums that have started."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def abandon(self) -> None:
        """Wait for the end of all sums that have started, whether they succeed or fail."""
        for pending in self._pending:
            with suppress(Exception):
                pending.wait()
        self._pending.clear()

    def _start_next(self) -> None:
        self._started += 1
        self._pending += self._start(self._buckets[self._started - 1])
