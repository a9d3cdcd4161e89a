# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Simulation of pipeline schedules: idle time and micro-batches in flight.

The order is torch's; each action takes its stage's time and waits for what it needs.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torchtitan_lr.parallel.stage_split import SCHEDULES


class Action(NamedTuple):
    """One action of a rank."""

    kind: str  # ``F`` forward, ``B`` backward, ``I`` backward of the inputs, ``W`` of the weights
    stage: int
    microbatch: int


@lru_cache(maxsize=8)  # each rank of a run asks for it
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


def makespan(orders: Sequence[Sequence[Action]], seconds: Sequence[tuple[float, float]]) -> float:
    """Return the seconds from the first action to the last's end; half a backward takes half.

    ``seconds`` are those of a micro-batch's forward and backward, by stage.
    """
    ends: dict[Action, float] = {}
    clocks, left = [0.0] * len(orders), [deque(order) for order in orders]
    while any(left):
        before = len(ends)
        for rank, actions in enumerate(left):
            while actions:
                action = actions[0]
                needed = [ends.get(need, math.inf) for need in _needs(action, len(seconds))]
                start = max(clocks[rank], max(needed, default=0.0))
                if start == math.inf:  # one that it needs has not ended
                    break
                actions.popleft()
                forward, backward = seconds[action.stage]
                took = {"F": forward, "B": backward}.get(action.kind, backward / 2)
                clocks[rank] = ends[action] = start + took
                if action.kind == "I":  # all that the stage before needs
                    ends[Action("B", action.stage, action.microbatch)] = clocks[rank]
        if len(ends) == before:
            raise ValueError("the schedule has a deadlock: its ranks wait for one another")
    return max(clocks)


def _needs(action: Action, stages: int) -> list[Action]:
    """Return the actions of which an action needs the end."""
    stage, i = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, i)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, i)]
    later = [Action("B", stage + 1, i)] if stage + 1 < stages else []
    return [Action("F", stage, i), *later]
