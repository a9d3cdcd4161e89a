# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The split of a model's modules into pipeline stages."""

import math
from typing import Any

# Supported schedules: whether a rank holds several stages, and whether backward is split into input
# gradients and later weight gradients.
SCHEDULES: dict[str, tuple[bool, bool]] = {
    "1F1B": (False, False),
    "GPipe": (False, False),
    "Interleaved1F1B": (True, False),
    "ZBVZeroBubble": (True, True),
}


def takes(schedule: str, ranks: int, microbatches: int) -> bool:
    """Return whether torch has an order of a schedule's actions for so many micro-batches."""
    if schedule == "Interleaved1F1B":  # all rounds of `ranks` or more are alike
        return microbatches % max(1, microbatches // ranks) == 0
    return schedule != "1F1B" or microbatches >= ranks


def stages_per_rank(section: Any, n_layers: int) -> int | float:
    """Return the number of stages per rank; a fraction if they do not divide evenly."""
    several, _ = SCHEDULES[section.pipeline_parallel_schedule]
    per_stage = section.pipeline_parallel_layers_per_stage
    if per_stage is None:
        return 2 if several else 1
    weights = (
        section.pipeline_parallel_first_stage_less_layers
        + section.pipeline_parallel_last_stage_less_layers
    )
    stages = math.ceil((n_layers + weights) / per_stage)
    whole, rest = divmod(stages, section.pipeline_parallel_degree)
    return stages / section.pipeline_parallel_degree if rest else whole


def modules_per_stage(job_config: Any, n_layers: int) -> list[list[str]]:
    """Return the module names of every stage, by torchtitan; ValueError for too few blocks."""
    # Late: importing torchtitan takes seconds.
    from torchtitan_lr.titan.specs import generate_llm_fqn_per_model_part

    section = job_config.parallelism
    if section.module_fqns_per_model_part is not None:
        given: list[list[str]] = section.module_fqns_per_model_part
        return given
    return generate_llm_fqn_per_model_part(
        section.pipeline_parallel_degree * int(stages_per_rank(section, n_layers)),
        n_layers,
        section.pipeline_parallel_first_stage_less_layers,
        section.pipeline_parallel_last_stage_less_layers,
    )


def layers_before_boundaries(job_config: Any, n_layers: int) -> list[int]:
    """Return the number of blocks before each boundary."""
    before, so_far = [], 0
    for names in modules_per_stage(job_config, n_layers)[:-1]:
        so_far += sum(name.startswith("layers.") for name in names)
        before.append(so_far)
    return before
