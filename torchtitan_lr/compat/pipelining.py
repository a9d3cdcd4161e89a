# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torch's pipeline schedules; tested with torch 2.11, 2.13 and 2.15."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _PipelineSchedule, _PipelineScheduleRuntime

SPLITS_BACKWARD = torch.__version__ >= "2.13"
"""Whether torch's two halves of a stage's backward give the right gradients.

Before torch 2.13 the second half fails at a custom Function whose node nothing else holds, adds up
the gradients of a node's several outputs, and counts a gradient twice that passes two of the nodes
where it begins.
"""


def backward_in_halves(loss: Tensor, x: Tensor, weights: list[nn.Parameter]) -> None:
    """Run a later stage's backward as a schedule that splits it: of the input, then of weights."""
    _, groups = stage_backward_input([loss.clone()], None, [x], iter(weights))
    stage_backward_weight(iter(weights), groups)


PipelineSchedule = _PipelineSchedule
"""The common base class of all schedules, which torch does not export; used as a type only."""

# From torch 2.15 a wait for a send is an action of its own; a schedule without it is refused.
_FORWARD = ("UNSHARD", "RECV_F", "FORWARD", "SEND_F", "WAIT_SEND_F", "RESHARD")


class PipelineStage(TorchStage):
    """torch's stage with reductions of our choice, and first messages that gloo accepts.

    Before torch 2.13 every stage sends one element to each neighbour before the first step, and the
    rank at the turn of a V sends to itself, which gloo refuses.
    """

    # Enables the gradient reductions of FSDP2's modules that the end of a round runs
    enable_reductions: Callable[[], None]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of a round of micro-batches."""
        # Torch enables every reduction here, those included that a later round of the step repeats.
        # If it calls another method for that, replicas are summed once per round again, and the
        # bytes of a test's ledger differ.
        if not isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
            return
        self.enable_reductions()
        with patch.object(self.submod, "set_requires_gradient_sync"):
            super().perform_reduce_grad(grad_scale_factor)

    if torch.__version__ < "2.13":

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            mine = dist.get_rank()
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != mine]


@contextmanager
def without_vote() -> Iterator[None]:
    """Let a schedule take its stages' shapes as given, as if all ranks had voted for that."""
    # Before the first step ranks vote whether shapes are known, and read the result, which a rank
    # without others and data cannot. Replaces ``_warmup_p2p`` of torch 2.13; older ones do not
    # vote. If upstream renames it, a rehearsal of a pipeline fails at the read.
    if not hasattr(_PipelineSchedule, "_warmup_p2p"):
        yield
        return
    from torch.distributed.pipelining._utils import InferenceMode

    def agreed(schedule: Any, stages: list[Any], *unused: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with patch.object(_PipelineSchedule, "_warmup_p2p", agreed):
        yield


def forward_only(schedule: PipelineSchedule) -> PipelineSchedule:
    """Remove backward from a schedule in place; a V-shaped one would run it even in evaluation."""
    # Deletes actions of ``_PipelineScheduleRuntime.pipeline_order_with_comms``. If upstream renames
    # an action's type or stores the actions elsewhere, validation under ``ZBVZeroBubble`` fails.
    if isinstance(schedule, _PipelineScheduleRuntime):
        for actions in schedule.pipeline_order_with_comms.values():
            actions[:] = [a for a in actions if a.computation_type.name in _FORWARD]
    return schedule


def rank_order(
    schedule: str, rank: int, ranks: int, stages_per_rank: int, microbatches: int
) -> list[tuple[str, int, int]]:
    """Return torch's order of a rank's actions, of several stages, without idle slots."""
    # A schedule's constructor needs stages with models, but the order depends only on a few
    # numbers. So this creates an object without calling the constructor, sets those numbers, and
    # calls ``_calculate_single_rank_operations`` on it. A test compares it with a real schedule's
    # order.
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
