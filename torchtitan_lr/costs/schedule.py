# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Simulation of pipeline schedules: idle time and micro-batches in flight.

The order is torch's; each action takes its stage's time and waits for what it needs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lr.parallel.stage_split import SCHEDULES


@dataclass(frozen=True)
class Action:
    """One action of a rank."""

    kind: str  # ``F`` forward, ``B`` backward, ``I`` backward of the inputs, ``W`` of the weights
    stage: int
    microbatch: int


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage for one micro-batch."""

    forward: float
    backward: float


def pipeline_order(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int
) -> list[list[Action]]:
    """Return every rank's actions in order."""
    if not SCHEDULES[schedule][0]:
        ahead = [microbatches if schedule == "GPipe" else ranks - p for p in range(ranks)]
        return [_one_stage(p, min(ahead[p], microbatches), microbatches) for p in range(ranks)]
    from torchtitan_lr.compat.pipelining import rank_order

    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    orders = []
    for rank in range(ranks):
        order = rank_order(schedule, rank, ranks, stages_per_rank, microbatches)
        orders.append([Action(letters[kind], *where) for kind, *where in order])
    return orders


def _one_stage(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """Return `ahead` forwards, then alternating backwards and forwards, then the last backwards."""
    order = [Action("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(Action("B", stage, i))
        if ahead + i < microbatches:
            order.append(Action("F", stage, ahead + i))
    return order


def most_in_flight(order: Sequence[Action], stage_bytes: Mapping[int, float]) -> tuple[float, int]:
    """Return the peak bytes of a rank's micro-batches in flight, and their number at the peak."""
    held: Counter[int] = Counter()
    worst, count = 0.0, 0
    for action in order:
        if action.kind == "F":
            held[action.stage] += 1
        elif action.kind in "BW":  # weight gradients also need the saved activations
            held[action.stage] -= 1
        size = sum(n * stage_bytes[stage] for stage, n in held.items())
        if size > worst or not count:
            worst, count = size, sum(held.values())
    return worst, count


def makespan(orders: Sequence[Sequence[Action]], seconds: Sequence[StageSeconds]) -> float:
    """Return the seconds from the first action to the last's end; half a backward takes half."""
    done: dict[Action, float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                start = _start(_needs(action, len(seconds)), done, clocks[rank])
                if start is None:
                    break
                stage = seconds[action.stage]
                whole = {"F": stage.forward, "B": stage.backward}
                took = whole.get(action.kind, stage.backward / 2)
                clocks[rank] = done[action] = start + took
                places[rank] += 1
        if sum(places) == before:
            raise ValueError("the schedule has a deadlock: its ranks wait for one another")
    return max(clocks)


def _start(needs: list[list[Action]], done: dict[Action, float], clock: float) -> float | None:
    """Return when an action can start; None as long as one of its needs is not met."""
    for alternatives in needs:
        ends = [done[action] for action in alternatives if action in done]
        if not ends:
            return None
        clock = max(clock, ends[0])
    return clock


def _needs(action: Action, stages: int) -> list[list[Action]]:
    """Return the dependencies of an action; each is met by any of its alternatives."""
    stage, i = action.stage, action.microbatch
    if action.kind == "F":
        return [[Action("F", stage - 1, i)]] if stage else []
    if action.kind == "W":
        return [[Action("I", stage, i)]]
    needs = [[Action("F", stage, i)]]
    if stage + 1 < stages:
        needs.append([Action("B", stage + 1, i), Action("I", stage + 1, i)])
    return needs
