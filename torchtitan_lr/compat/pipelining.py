# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torch's pipeline schedules from inside, and torchtitan's way to build a stage.

Seen in torch 2.11 and 2.13 and in torchtitan 0.2.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

__all__ = ["PipelineSchedule", "forward_only", "rank_order", "stages_built_by"]

PipelineSchedule = _PipelineSchedule
"""The common type of all schedules, which torch does not export. It is used as a type only."""

_FORWARD = {
    _ComputationType.UNSHARD,
    _ComputationType.RECV_F,
    _ComputationType.FORWARD,
    _ComputationType.SEND_F,
    _ComputationType.RESHARD,
}


def forward_only(schedule: PipelineSchedule) -> PipelineSchedule:
    """Take backward out of a schedule in place: a V-shaped one fails in it even in evaluation.

    Deletes actions of ``_PipelineScheduleRuntime.pipeline_order_with_comms``. If upstream renames
    an action's type, the import fails. If it keeps the actions elsewhere, validation under
    ``ZBVZeroBubble`` fails.
    """
    if isinstance(schedule, _PipelineScheduleRuntime):
        for actions in schedule.pipeline_order_with_comms.values():
            actions[:] = [a for a in actions if a.computation_type in _FORWARD]
    return schedule


def rank_order(
    schedule: str, rank: int, ranks: int, stages_per_rank: int, microbatches: int
) -> list[tuple[str, int, int]]:
    """Return torch's order of a rank's actions under a schedule of several stages per rank.

    A schedule's constructor wants stages with models, yet the order depends on numbers alone. So an
    object without a constructor gets those numbers, and ``_calculate_single_rank_operations`` is
    called on it. If upstream reads another field, this raises an AttributeError. If it computes the
    order otherwise, the test that compares the order with a real schedule's fails.

    Args:
        schedule: Name without its prefix ``Schedule``.
        rank: Which rank of the pipeline.
        ranks: Pipeline ranks P.
        stages_per_rank: Stages that each of them holds.
        microbatches: Micro-batches m of a step.

    Returns:
        Name of the computation, stage and micro-batch of every action; pauses are left out.
    """
    kind: Any = getattr(schedules, f"Schedule{schedule}")
    empty = object.__new__(kind)
    rounds = max(1, microbatches // ranks)
    empty.__dict__.update(
        pp_group_size=ranks,
        n_local_stages=stages_per_rank,
        num_stages=ranks * stages_per_rank,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    return [
        (a.computation_type.name, a.stage_index, a.microbatch_index)
        for a in empty._calculate_single_rank_operations(rank)
        if a is not None
    ]


@contextmanager
def stages_built_by(
    build: Callable[[nn.Module, int], Any], stages: int, device: torch.device, group: Any
) -> Iterator[None]:
    """Let torchtitan's `pipeline_llm` build its stages with a function of ours.

    Upstream has no argument for the shapes at a stage's boundaries, without which torch runs the
    model to find them out. So ``PipelineStage`` in torchtitan's module is replaced. Its call is
    ``PipelineStage(part, index, stages, device, group=group)`` in torchtitan 0.2.2.

    Args:
        build: Builds a stage of its part of the model and its index.
        stages: How many there are in the pipeline.
        device: Of this rank.
        group: Process group of the pipeline.

    Raises:
        TypeError: Upstream passes an argument that is not known here, which `build` would lose.
        RuntimeError: Upstream's number of stages, device or group is another one.
    """
    import torchtitan.distributed.pipeline_parallel as titan_pipeline

    def stage(*args: Any, **named: Any) -> Any:
        if len(args) != 4 or named.keys() != {"group"}:
            raise TypeError(
                "torchtitan builds a PipelineStage of arguments that "
                "torchtitan_lr.compat.pipelining does not know: "
                f"{len(args)} by position instead of 4, {sorted(named)} by name instead of "
                "['group']"
            )
        part, index, *rest = args
        if rest != [stages, device] or named["group"] is not group:
            raise RuntimeError(
                f"torchtitan builds a stage of {rest[0]} on {rest[1]}, expected {stages} on "
                f"{device} and the group of the pipeline"
            )
        return build(part, index)

    with patch.object(titan_pipeline, "PipelineStage", stage):
        yield
