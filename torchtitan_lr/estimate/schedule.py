# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""When each rank of a pipeline runs what: its idle time, and how many micro-batches it holds.

The order of actions is torch's for the interleaved schedules, and the textbook's, which is torch's
too, for 1F1B and GPipe. Actions take the time of their stage and wait for what they need: formulas
for bubbles hold for equal stages only, this simulation for any.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lr.parallel.pipeline.stage_split import SCHEDULES


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    Args:
        kind: ``F`` forward, ``B`` backward, ``I`` backward of the inputs, ``W`` of the weights.
        stage: Which stage.
        microbatch: Which micro-batch.
    """

    kind: str
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
    """Return every rank's actions in order.

    Args:
        schedule: One of `SCHEDULES`.
        ranks: Pipeline ranks P.
        stages_per_rank: Stages that each of them holds.
        microbatches: Micro-batches m of a step.
    """
    if not SCHEDULES[schedule][0]:
        ahead = [microbatches if schedule == "GPipe" else ranks - p for p in range(ranks)]
        return [_one_stage(p, min(ahead[p], microbatches), microbatches) for p in range(ranks)]
    from torchtitan_lr.compat.pipelining import rank_order

    return [
        [
            Action(_KINDS[kind], stage, microbatch)
            for kind, stage, microbatch in rank_order(
                schedule, p, ranks, stages_per_rank, microbatches
            )
        ]
        for p in range(ranks)
    ]


_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _one_stage(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """`ahead` forward passes, then backward and forward in turns, then the other backwards."""
    order = [Action("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(Action("B", stage, i))
        if ahead + i < microbatches:
            order.append(Action("F", stage, ahead + i))
    return order


def most_in_flight(order: Sequence[Action], stage_bytes: Mapping[int, float]) -> tuple[float, int]:
    """Return the most bytes that a rank's micro-batches hold at once, and how many those are.

    Args:
        order: The rank's actions.
        stage_bytes: What a micro-batch leaves in a stage between forward and backward.
    """
    held: Counter[int] = Counter()
    worst, count = 0.0, 0
    for action in order:
        if action.kind == "F":
            held[action.stage] += 1
        elif action.kind in "BW":  # the weights' gradients need what was kept, too
            held[action.stage] -= 1
        size = sum(n * stage_bytes[stage] for stage, n in held.items())
        if size > worst or not count:
            worst, count = size, sum(held.values())
    return worst, count


def makespan(orders: Sequence[Sequence[Action]], seconds: Sequence[StageSeconds]) -> float:
    """Return the seconds from the first action to the end of the last.

    Args:
        orders: Every rank's actions.
        seconds: Of every stage; a backward in two halves is cut in the middle.

    Raises:
        ValueError: If the ranks wait for one another for ever.
    """
    done: dict[Action, float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needs = _needs(action, len(seconds))
                ready = [next((done[n] for n in either if n in done), None) for either in needs]
                if None in ready:
                    break
                start = max([clocks[rank], *(time for time in ready if time is not None)])
                clocks[rank] = done[action] = start + _duration(action, seconds)
                places[rank] += 1
        if sum(places) == before:
            raise ValueError("the schedule never ends: its ranks wait for one another")
    return max(clocks)


def _needs(action: Action, stages: int) -> list[list[Action]]:
    """What has to be done before, each in one of two forms."""
    stage, i = action.stage, action.microbatch
    if action.kind == "F":
        return [[Action("F", stage - 1, i)]] if stage else []
    if action.kind == "W":
        return [[Action("I", stage, i)]]
    needs = [[Action("F", stage, i)]]
    if stage + 1 < stages:
        needs.append([Action("B", stage + 1, i), Action("I", stage + 1, i)])
    return needs


def _duration(action: Action, seconds: Sequence[StageSeconds]) -> float:
    stage = seconds[action.stage]
    return {"F": stage.forward, "B": stage.backward}.get(action.kind, stage.backward / 2)
