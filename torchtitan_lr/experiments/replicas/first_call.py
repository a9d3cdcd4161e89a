# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The first collective of a step: tokens, loss, and whether a member's loss is bad or it stops.

It also carries what the members expect of the calls that follow (`agreement`).

A rank's loss is known once its last forward pass is done. The sum starts there, before the backward
pass in which the first gradients are sent, and its result is read behind theirs. So it costs no
round trip of its own. It is a message of its own, since the numbers are fp64 and cores may be sent
in bf16.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchtitan_lr.experiments.replicas.exchange import NumberSum


class FirstCall:
    """The numbers of a step, on their way as soon as the last micro-batch's loss is known.

    Args:
        group: The `ReplicaGroup`.
        microbatches: Of this rank in the step.
        numbers: Returns this rank's numbers, given its summed token losses in nats.
    """

    def __init__(
        self, group: Any, microbatches: int, numbers: Callable[[float], list[float]]
    ) -> None:
        self._group, self._numbers = group, numbers
        self._missing, self._loss = microbatches, 0.0
        self._sum: NumberSum | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch; the last one starts the sum.

        Args:
            loss: Summed over tokens, a scalar.
        """
        self._loss += float(loss.detach())
        self._missing -= 1
        if not self._missing:
            numbers, calls = self._numbers(self._loss), self._group.calls
            self._count = len(numbers)
            self._sum = NumberSum(self._group, [*numbers, *calls.claims()])
            calls.decide_by(self._claims)

    def result(self) -> list[float]:
        """Wait for the sums over all ranks of all members; undefined if the group has failed."""
        assert self._sum is not None
        return self._sum.wait()[: self._count]

    def _claims(self) -> list[float]:
        assert self._sum is not None
        return self._sum.of_group()[self._count :]


class SeenLoss:
    """A loss whose value is handed on before its backward pass."""

    def __init__(self, loss: Any, see: Callable[[Tensor], None]) -> None:
        self._loss, self._see = loss, see

    def __call__(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a prediction, a scalar."""
        value: Tensor = self._loss(prediction, labels)
        self._see(value)
        return value
