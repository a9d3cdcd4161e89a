# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Faults of a running fleet, one after the other, and the seconds that each costs.

After every fault the fleet is whole again before the next: a killed replica is started again, a
stopped one is woken, once the others have gone on.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from tests.support.faults.fleet import Fleet
from tests.support.faults.orders import (
    BEFORE,
    COMMITTED,
    COMPARISON,
    DURING,
    HEAL,
    PLAIN,
    REFRESH,
    VOTE,
    Strike,
    notes,
    order,
)

SIGNALS = ("SIGKILL", "SIGSTOP")

_AHEAD = 3
"""Steps between an order and its strike: by then all that shall strike have read theirs."""

_ON = 2
"""Steps that the others commit before a replica returns."""

_COMPARISONS = 2  # collectives of a comparison


@dataclass(frozen=True)
class Outcome:
    """A fault and what it cost.

    Attributes:
        fault: What happened, without signal and index: rows of a table are summed up by it.
        signal: ``SIGKILL``, ``SIGSTOP`` or ``-``.
        index: Number of the collective, -1 for none.
        replicas: Who was struck.
        step: The step that was struck.
        lost: Seconds by which the others' next step took longer than a usual one.
        discarded: Attempts that the next committed step had before.
        at_return: Seconds by which the steps of the return took longer than usual ones, together.
    """

    fault: str
    signal: str
    index: int
    replicas: tuple[int, ...]
    step: int
    lost: float
    discarded: int
    at_return: float


def strikes(calls: dict[str, int], signals: Sequence[str]) -> list[Strike]:
    """Return one strike for every point of a plain and of a refresh step.

    Args:
        calls: Collectives of a step, by its kind.
        signals: Those to send.
    """
    found = []
    for name in signals:
        for kind in (PLAIN, REFRESH):
            for index in range(calls[kind]):
                found += [Strike(name, point, kind, index) for point in (BEFORE, DURING)]
            found += [Strike(name, point, kind) for point in (VOTE, COMMITTED)]
    return found


def count_calls(fleet: Fleet) -> dict[str, int]:
    """Return the number of collectives of a plain and of a refresh step, by the first replica.

    In some steps the members exchange the positions of their data besides; the smallest number
    counts.

    Args:
        fleet: A fleet that has committed a plain step and a refresh.
    """
    counts: dict[str, int] = {}
    for found in notes(fleet.orders, 0, "step"):
        is_refresh = Strike("", "", REFRESH).is_due(found["step"], fleet.setting.interval)
        kind, number = REFRESH if is_refresh else PLAIN, len(found["calls"])
        if found["succeeded"]:
            counts[kind] = min(number, counts.get(kind, number))
    return counts


class Trials:
    """Faults of a fleet, all of whose replicas run.

    Args:
        fleet: The fleet.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._replicas = len(fleet.setting.places)
        self._turn = 0

    def strike(self, strike: Strike, number: int = 1) -> Outcome:
        """Strike replicas at one point of the same step, and wait until all are back.

        Args:
            strike: The order; each time other replicas get it.
            number: How many.

        Raises:
            RunFailedError: The fleet does not go on, or a replica failed.
        """
        fleet = self.fleet
        fleet.wait_full()
        victims = [(self._turn + place) % self._replicas for place in range(number)]
        self._turn += 1
        due = Strike(
            strike.signal,
            strike.point,
            strike.kind,
            strike.index,
            fleet.last()["step"] + _AHEAD,
        )
        before = {victim: len(notes(fleet.orders, victim, "struck")) for victim in victims}
        for victim in victims:
            order(fleet.orders, victim, due)
        fleet.wait(lambda: all(self._struck(v) > n for v, n in before.items()), "strike")
        at = [notes(fleet.orders, victim, "struck")[-1] for victim in victims]
        others = [replica for replica in range(self._replicas) if replica not in victims]
        section = fleet.setting.config.fault_tolerance
        if len(others) >= section.min_replica_size:
            fleet.wait_steps(_ON, others)
        else:  # they wait; a stop is long enough to be noticed
            time.sleep(fleet.setting.heartbeat_seconds + section.process_group_timeout_ms / 1000)
        back = time.time()
        for victim in victims:
            self._bring_back(victim, strike.signal)
        full = self._wait_whole(at[0]["step"])
        where = "two at once, " if number > 1 else ""
        fault = f"{where}{strike.kind} step, {strike.point}"
        lost, discarded, at_return = cost(fleet.commits(), at[0]["time"], back, full)
        index = strike.index if strike.point in (BEFORE, DURING) else -1
        who = tuple(victims)
        step = at[0]["step"]
        return Outcome(fault, strike.signal, index, who, step, lost, discarded, at_return)

    def strike_newcomers(self, signals: Sequence[str]) -> Iterator[Outcome]:
        """Strike a newcomer while it heals, and a member while it is compared with one."""
        comparisons = [(COMPARISON, index, who) for index in range(_COMPARISONS) for who in (0, 1)]
        for name in signals:
            for point, index, who in [(HEAL, 0, 0), *comparisons]:
                yield self._strike_return(Strike(name, point, PLAIN, index), who)

    def _strike_return(self, strike: Strike, other: int) -> Outcome:
        """Kill a replica, and strike it or ``other`` replicas further when it is back."""
        fleet = self.fleet
        fleet.wait_full()
        gone = self._turn % self._replicas
        victim = (gone + other) % self._replicas
        self._turn += 1
        fleet.kill(gone)
        fleet.wait_steps(_ON)
        before, step = self._struck(victim), fleet.last()["step"]
        order(fleet.orders, victim, strike)
        fleet.start(gone)
        fleet.wait(lambda: self._struck(victim) > before, "strike")
        at = notes(fleet.orders, victim, "struck")[-1]
        if victim == gone:  # the others are enough to go on
            fleet.wait_steps(_ON)
        else:
            time.sleep(fleet.setting.heartbeat_seconds)
        back = time.time()
        self._bring_back(victim, strike.signal)
        full = self._wait_whole(step)
        whose = "a newcomer" if victim == gone else "a member beside a newcomer"
        lost, discarded, at_return = cost(fleet.commits(), at["time"], back, full)
        index = strike.index if strike.point == COMPARISON else -1
        fault = f"{whose}, {strike.point}"
        who = (victim,)
        return Outcome(fault, strike.signal, index, who, step, lost, discarded, at_return)

    def restart_lighthouse(self, seconds: float) -> Outcome:
        """Kill the quorum server and start it again after some seconds."""
        fleet = self.fleet
        fleet.wait_full()
        at, step = time.time(), fleet.last()["step"]
        fleet.stop_lighthouse()
        time.sleep(seconds)
        fleet.start_lighthouse()
        back = time.time()
        fleet.wait_steps(_ON, range(self._replicas))
        full = fleet.wait_full()
        lost, discarded, _ = cost(fleet.commits(), at, back, full)
        fault = f"quorum server away for {seconds:g} s"
        return Outcome(fault, "SIGKILL", -1, (), step, lost, discarded, 0.0)

    def heal_slowly(self, seconds: float) -> Outcome:
        """Kill a replica; the new one needs some seconds longer to heal than a step takes."""
        fleet = self.fleet
        fleet.wait_full()
        victim = self._turn % self._replicas
        self._turn += 1
        at, step = time.time(), fleet.last()["step"]
        fleet.kill(victim)
        fleet.wait_steps(_ON)
        back = time.time()
        fleet.start(victim, seconds)
        full = self._wait_whole(step)
        lost, discarded, at_return = cost(fleet.commits(), at, back, full)
        fault = f"heal takes {seconds:g} s longer"
        return Outcome(fault, "SIGKILL", -1, (victim,), step, lost, discarded, at_return)

    def _struck(self, replica: int) -> int:
        return len(notes(self.fleet.orders, replica, "struck"))

    def _bring_back(self, replica: int, name: str) -> None:
        if signal.Signals[name] == signal.SIGSTOP:
            self.fleet.send_signal(replica, signal.SIGCONT)
        else:
            self.fleet.kill(replica)
            self.fleet.start(replica)

    def _wait_whole(self, step: int) -> float:
        """Wait until all take part in a step behind ``step`` and in the one after it."""
        fleet = self.fleet
        everyone = range(self._replicas)
        fleet.wait(lambda: fleet.last()["step"] > step + 1, "step", everyone)
        fleet.wait_full()
        fleet.wait_steps(1, everyone)
        return fleet.wait_full()


def cost(
    commits: Sequence[dict[str, Any]], at: float, back: float, full: float
) -> tuple[float, int, float]:
    """Return the seconds that a fault cost, attempts discarded at once, and seconds at the return.

    Args:
        commits: Records of all committed steps, in order.
        at: Time of the fault.
        back: When the struck replicas were started again or woken.
        full: When all took part again.
    """
    times = [record["time"] for record in commits]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    usual = median(gaps)
    # A replica that was struck behind its vote has committed: the step after that one waits.
    after = [place for place, time_ in enumerate(times) if time_ >= at and place]
    first = max(after[:2], key=lambda place: gaps[place - 1])
    later = [place for place in after if place > first and back <= times[place] <= full]
    at_return = sum(max(0.0, gaps[place - 1] - 2 * usual) for place in later)
    return max(0.0, gaps[first - 1] - usual), commits[first].get("discarded", 0), at_return
