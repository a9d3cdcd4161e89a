# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas on two machines, whose link is cut and slowed: two network namespaces."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.faults.fleet import Fleet, Place
from tests.support.faults.trials import Outcome, cost
from tests.support.namespaces import ADDRESSES, cut, join, limit, two_machines, unlimit


@contextmanager
def places(number: int) -> Iterator[list[Place]]:
    """Make two machines; the last replica is on the second, the others are on the first.

    Args:
        number: Number of replicas.

    Yields:
        Their places.

    Raises:
        NotPermittedError: The tools are missing or the kernel refuses.
    """
    with two_machines() as names:
        first, second = (Place(*end) for end in zip(ADDRESSES, names, strict=True))
        yield [first] * (number - 1) + [second]


class Link:
    """The link between the replicas of a fleet.

    Args:
        fleet: A fleet in the places of `places`, all of whose replicas run.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        places = fleet.setting.places
        self._ends = [places[0].namespace, places[-1].namespace]

    def cut(self, seconds: float) -> Outcome:
        """Lose every packet for some seconds, and wait until all replicas take part again."""
        fleet, last = self._fleet, len(self._fleet.setting.places) - 1
        fleet.wait_full()
        step, at = fleet.last()["step"], time.time()
        cut(self._ends)
        time.sleep(seconds)
        join(self._ends)
        back = time.time()
        fleet.wait(lambda: fleet.last()["step"] > step + 1, "step")
        fleet.wait_full()
        full = fleet.wait_steps(1)
        lost, discarded, at_return = cost(fleet.commits(), at, back, full)
        fault = f"link cut for {seconds:g} s"
        return Outcome(fault, "-", -1, (last,), step, lost, discarded, at_return)

    def slow(self, mbit: float, seconds: float) -> Outcome:
        """Limit the link for some seconds; ``lost`` is what a step then takes longer."""
        fleet = self._fleet
        fleet.wait_full()
        step, at = fleet.last()["step"], time.time()
        for end in self._ends:
            limit(end, mbit)
        time.sleep(seconds)
        for end in self._ends:
            unlimit(end)
        back = time.time()
        fleet.wait_steps(2)
        full = fleet.wait_full()
        lost, discarded, at_return = cost(fleet.commits(), at, back, full)
        fault = f"link at {mbit:g} Mbit/s for {seconds:g} s"
        return Outcome(fault, "-", -1, (), step, lost, discarded, at_return)
