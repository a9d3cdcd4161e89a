# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The modelled time of a run's step."""

from functools import partial

from torchtitan_lr.estimate.run import Run, blocks_of
from torchtitan_lr.estimate.schedule import StageSeconds, makespan, pipeline_order
from torchtitan_lr.estimate.step_time import (
    Hardware,
    StepTime,
    compute_seconds,
    exposed_seconds,
    model_step_time,
)
from torchtitan_lr.estimate.traffic import element_size
from torchtitan_lr.formulas.activations import recompute_flops
from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, head_flops, layer_flops
from torchtitan_lr.formulas.plans.registry import formula_of
from torchtitan_lr.formulas.traffic import Traffic
from torchtitan_lr.parallel.recompute.activation_checkpoint import MODES, BlockFlops


def step_time(run: Run, traffic: list[list[Traffic]], hardware: Hardware) -> StepTime:
    """Model a step on the pipeline rank that is busy longest.

    Args:
        run: The run.
        traffic: Every pipeline rank's, of a whole step.
        hardware: The machine.
    """
    sizes = partial(element_size, dtypes=run.wire_dtypes)
    times = [
        model_step_time(
            sum(sum(_stage_seconds(run, stage, hardware)) for stage in run.stages_of(pp_rank))
            * run.microbatches
            * run.accumulation,
            rows,
            sizes,
            run.mesh,
            hardware,
        )
        for pp_rank, rows in enumerate(traffic)
    ]
    longest = max(times, key=lambda time: time.total)
    if run.pp == 1:
        return longest
    bubble = _bubble(run, traffic, hardware)
    return StepTime(
        longest.compute, longest.exposed_communication, longest.hidden_communication, bubble
    )


def _bubble(run: Run, traffic: list[list[Traffic]], hardware: Hardware) -> float:
    """Seconds from the first action to the last, less those of the busiest rank."""
    sizes = partial(element_size, dtypes=run.wire_dtypes)
    stages = [StageSeconds(0, 0)] * len(run.stages)
    for pp_rank, rows in enumerate(traffic):
        mine = run.stages_of(pp_rank)
        exposed = exposed_seconds(rows, sizes, run.mesh, hardware)
        passes = len(mine) * run.microbatches * run.accumulation
        for stage in mine:
            forward, backward = _stage_seconds(run, stage, hardware)
            stages[stage] = StageSeconds(
                forward + exposed["forward"] / passes, backward + exposed["backward"] / passes
            )
    schedule = run.config.parallelism.pipeline_parallel_schedule
    per_rank = len(run.stages) // run.pp
    orders = pipeline_order(schedule, run.pp, per_rank, run.microbatches)
    busiest = max(
        run.microbatches * sum(stages[s].forward + stages[s].backward for s in run.stages_of(p))
        for p in range(run.pp)
    )
    return run.accumulation * (makespan(orders, stages) - busiest)


def _stage_seconds(run: Run, stage: int, hardware: Hardware) -> tuple[float, float]:
    """Forward and backward products of a stage for one micro-batch."""
    units = run.stages[stage]
    forward = blocks_of(units) * block_flops(run)
    if "head" in units:
        forward += head_flops(run.args, run.seq_len) / FORWARD_AND_BACKWARD / run.tp
    backward = (FORWARD_AND_BACKWARD - 1) * forward + blocks_of(units) * repeated_flops(run)
    scale = run.microbatch
    return compute_seconds(forward * scale, hardware), compute_seconds(backward * scale, hardware)


def block_flops(run: Run) -> float:
    """FLOPs of a block's forward pass for one sequence on one rank.

    Under some plans (``vanilla_replicated``) every rank attends with every head.
    """
    flops = layer_flops(run.args, run.seq_len)
    heads = run.tp if formula_of(run.settings, run.tp).shards_heads else 1
    linears = (flops.attention_linears + flops.feed_forward) / run.tp
    return (linears + flops.attention_scores / heads) / FORWARD_AND_BACKWARD


def repeated_flops(run: Run) -> float:
    """FLOPs that checkpointing repeats of a block, for one sequence on one rank.

    The ranks share all products evenly; under ``vanilla_replicated`` attention counts too low.
    """
    flops, shares = layer_flops(run.args, run.seq_len), FORWARD_AND_BACKWARD * run.tp
    block = BlockFlops(
        attention_linears=flops.attention_linears // shares,
        attention_scores=flops.attention_scores // shares,
        feed_forward=flops.feed_forward // shares,
        up_projections=recompute_flops(run.args, run.seq_len, True, run.tp),
    )
    return MODES[run.checkpointing].repeated_flops(run.config.activation_checkpoint, block)
