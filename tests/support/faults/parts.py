# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parts of a check of faults: which faults happen, in which order."""

from collections.abc import Callable, Iterator, Mapping

from tests.support.faults.fleet import Fleet
from tests.support.faults.network import Link
from tests.support.faults.orders import BEFORE, COMMITTED, DURING, PLAIN, REFRESH, Strike
from tests.support.faults.trials import SIGNALS, Outcome, Trials, count_calls, strikes

_SERVER_SECONDS = 4.0
_HEAL_SECONDS = 5.0
_CUT_SECONDS = 8.0
_SLOW_SECONDS = 20.0
_SLOW_MBIT = 20.0


def outcomes_of(part: str, fleet: Fleet, repeats: int) -> Iterator[Outcome]:
    """Start a fleet, let the faults of a part happen, and yield what each cost.

    Args:
        part: ``kill``, ``stop``, ``two``, ``newcomer``, ``quorum`` or ``network``.
        fleet: A fleet that was not started.
        repeats: How often each fault happens.

    Raises:
        RunFailedError: The fleet does not go on, or a replica failed.
    """
    fleet.start_lighthouse()
    for replica in range(len(fleet.setting.places)):
        fleet.start(replica)
    fleet.wait_full()
    fleet.wait_steps(fleet.setting.interval + 2)  # a plain step and a refresh with all
    trials = Trials(fleet)
    for _ in range(repeats):
        yield from PARTS[part](trials)


def _kill(trials: Trials) -> Iterator[Outcome]:
    yield from map(trials.strike, strikes(count_calls(trials.fleet), SIGNALS[:1]))


def _stop(trials: Trials) -> Iterator[Outcome]:
    yield from map(trials.strike, strikes(count_calls(trials.fleet), SIGNALS[1:]))


def _two(trials: Trials) -> Iterator[Outcome]:
    middle = count_calls(trials.fleet)[REFRESH] // 2
    for name in SIGNALS:
        for point, kind in ((BEFORE, PLAIN), (DURING, REFRESH), (COMMITTED, PLAIN)):
            yield trials.strike(Strike(name, point, kind, middle), 2)


def _newcomer(trials: Trials) -> Iterator[Outcome]:
    return trials.strike_newcomers(SIGNALS)


def _quorum(trials: Trials) -> Iterator[Outcome]:
    yield trials.restart_lighthouse(_SERVER_SECONDS)
    yield trials.heal_slowly(_HEAL_SECONDS)


def _network(trials: Trials) -> Iterator[Outcome]:
    link = Link(trials.fleet)
    yield link.cut(_CUT_SECONDS)
    yield link.slow(_SLOW_MBIT, _SLOW_SECONDS)


PARTS: Mapping[str, Callable[[Trials], Iterator[Outcome]]] = {
    "kill": _kill,
    "stop": _stop,
    "two": _two,
    "newcomer": _newcomer,
    "quorum": _quorum,
    "network": _network,
}
