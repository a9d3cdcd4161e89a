# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The modelled time of a run's step."""

from dataclasses import replace
from functools import partial
from math import prod

from torchtitan_lr.estimate.kernels import Work
from torchtitan_lr.estimate.run import Run, blocks_of
from torchtitan_lr.estimate.schedule import StageSeconds, makespan, pipeline_order
from torchtitan_lr.estimate.step_time import (
    Hardware,
    StepTime,
    element_wise_seconds,
    exposed_seconds,
    model_step_time,
    moved_seconds,
    product_seconds,
)
from torchtitan_lr.estimate.traffic import element_size
from torchtitan_lr.estimate.work import PassWork
from torchtitan_lr.formulas.memory import sharded
from torchtitan_lr.formulas.traffic import Traffic

ADAMW_PASSES = 10
"""Passes over a rank's parameters in a step of fused AdamW: clipping reads the gradients twice and
writes them once; Adam reads weight, gradient and both moments and writes all but the gradient."""


def step_time(
    run: Run, traffic: list[list[Traffic]], hardware: Hardware, work: PassWork
) -> StepTime:
    """Model a step on the pipeline rank that is busy longest.

    Args:
        run: The run.
        traffic: Every pipeline rank's, of a whole step.
        hardware: The machine.
        work: Recorded by `work_of_run`.
    """
    sizes = partial(element_size, dtypes=run.wire_dtypes)
    times = [
        model_step_time(
            _over_step(run, pp_rank, hardware, work, 0),
            rows,
            sizes,
            run.mesh,
            hardware,
            element_wise=_over_step(run, pp_rank, hardware, work, 1)
            + _staging_seconds(run, pp_rank, hardware),
            optimizer=_optimizer_seconds(run, pp_rank, hardware),
        )
        for pp_rank, rows in enumerate(traffic)
    ]
    longest = max(times, key=lambda time: time.total)
    if run.pp == 1:
        return longest
    return replace(longest, bubble=_bubble(run, traffic, hardware, work))


def _over_step(run: Run, pp_rank: int, hardware: Hardware, work: PassWork, part: int) -> float:
    """Seconds of products (part 0) or of other kernels (1) of all a rank's passes."""
    passes = [each for s in run.stages_of(pp_rank) for each in _passes(run, s, hardware, work)]
    return sum(each[part] for each in passes) * run.microbatches * run.accumulation


def _optimizer_seconds(run: Run, pp_rank: int, hardware: Hardware) -> float:
    """AdamW's time; TSR-Adam's projections do not count."""
    shapes = [shape for unit in run.units_of(pp_rank).values() for shape in unit.values()]
    elements = sum(prod(sharded(shape, run.shard)) for shape in shapes)
    return moved_seconds(ADAMW_PASSES * run.precision.parameter * elements, hardware)


def _staging_seconds(run: Run, pp_rank: int, hardware: Hardware) -> float:
    """Return the copies of weights out of FSDP's gathers and of gradients into its reductions."""
    sizes = run.precision
    if run.shard == 1 and sizes.compute == sizes.parameter:
        return 0.0
    units = run.units_of(pp_rank).values()
    elements = sum(prod(shape) for unit in units for shape in unit.values())
    gathers = 2 if run.reshards else 1
    per_element = gathers * 2 * sizes.compute + sizes.compute + sizes.reduce
    return moved_seconds(run.accumulation * per_element * elements, hardware)


def _bubble(run: Run, traffic: list[list[Traffic]], hardware: Hardware, work: PassWork) -> float:
    """Seconds from the first action to the last, less those of the busiest rank."""
    sizes = partial(element_size, dtypes=run.wire_dtypes)
    stages = [StageSeconds(0, 0)] * len(run.stages)
    for pp_rank, rows in enumerate(traffic):
        mine = run.stages_of(pp_rank)
        exposed = exposed_seconds(rows, sizes, run.mesh, hardware)
        passes = len(mine) * run.microbatches * run.accumulation
        for stage in mine:
            forward, backward = (sum(each) for each in _passes(run, stage, hardware, work))
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


def _passes(run: Run, stage: int, hardware: Hardware, work: PassWork) -> list[tuple[float, float]]:
    """Seconds of products and of other kernels, forward and backward of a micro-batch."""
    units, seconds = run.stages[stage], []
    for block, ends in zip(work.block, work.ends, strict=True):
        # The embedding counts with the head.
        mine = Work().plus(block, blocks_of(units)).plus(ends, float("head" in units))
        seconds.append((product_seconds(mine, hardware), element_wise_seconds(mine, hardware)))
    return seconds
