# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of pipelines: schedule, split of the model, micro-batches."""

import operator
from itertools import chain
from typing import Any

from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.configured import configured_args
from torchtitan_lr.parallel.stage_split import SCHEDULES, modules_per_stage, stages_per_rank


def check_pipeline(config: Any, world_size: int, device_type: str) -> None:
    """Check the schedule, that every stage gets blocks, and that micro-batches divide the batch."""
    section = config.parallelism
    if section.pipeline_parallel_degree == 1:
        return
    schedule = section.pipeline_parallel_schedule
    want = one_of(SCHEDULES, schedule)
    require(schedule in SCHEDULES, "parallelism.pipeline_parallel_schedule", schedule, want)
    recomputation = config.activation_checkpoint
    compiled = config.compile.enable and "model" in config.compile.components
    always = section.fsdp_reshard_after_forward == "always"
    single = recomputation.mode == "selective" and recomputation.selective_ac_option == "op"
    refused = [  # without meaning, or untested with these models
        ("parallelism.pipeline_parallel_schedule_csv", "'' with a pipeline"),
        ("training.enable_cpu_offload", "False with a pipeline"),
    ]
    if config.comm.mode == "fake_backend":
        want = "'default' with a pipeline: the one rank of a dry run has no neighbours"
        refused.append(("comm.mode", want))
    if SCHEDULES[schedule][1]:  # backward in two halves, which run each graph twice
        of = f"with the schedule {schedule}"
        if compiled:
            want = f"false {of}: compiled blocks have one backward, not two"
            refused.append(("compile.enable", want))
        if always:
            want = f"'default' or 'never' {of}, which needs the weights again"
            refused.append(("parallelism.fsdp_reshard_after_forward", want))
        if single:  # torch frees what it saved after the first of two recomputations
            want = f"a number of blocks, as text, {of}: torch repeats once only"
            refused.append(("activation_checkpoint.selective_ac_option", want))
    for key, want in refused:
        value = operator.attrgetter(key)(config)
        require(not value, key, value, want)
    stages, batch = len(_check_stages(config)), config.training.local_batch_size
    key = "parallelism.pipeline_parallel_microbatch_size"
    size = section.pipeline_parallel_microbatch_size
    microbatches = batch // size if size > 0 else 0
    rounds = max(1, microbatches // section.pipeline_parallel_degree)
    want = ""
    if size < 1 or batch % size:
        want = f"a divisor of training.local_batch_size ({batch})"
    elif schedule == "1F1B" and microbatches < stages:
        want = f"one that makes at least {stages} micro-batches, one a stage, of {batch} sequences"
    elif schedule == "Interleaved1F1B" and microbatches % rounds:
        want = f"one that makes a multiple of {rounds} micro-batches of {batch} sequences"
    require(not want, key, size, want)


def _check_stages(config: Any) -> list[list[str]]:
    """Check the split of the model: each module once, in order, a block in every inner stage."""
    section, args = config.parallelism, configured_args(config)
    degree, schedule = section.pipeline_parallel_degree, section.pipeline_parallel_schedule
    per_rank = stages_per_rank(section, args.n_layers)
    several, two = SCHEDULES[schedule]
    fits = per_rank == 2 if two else per_rank >= 2 if several else per_rank == 1
    if not fits or per_rank != int(per_rank):
        number = "2 stages" if two else "2 or more stages" if several else "1 stage"
        want = f"one that gives each of the {degree} ranks {number} under {schedule}"
        want += f"; this makes {per_rank:g} a rank"
        key = "parallelism.pipeline_parallel_layers_per_stage"
        raise ConfigError(key, section.pipeline_parallel_layers_per_stage, want)
    wanted = degree * int(per_rank)
    try:
        stages = modules_per_stage(config, args.n_layers)
    except ValueError:
        want = f"fewer stages than {wanted}, into which {args.n_layers} blocks do not go"
        raise ConfigError("parallelism.pipeline_parallel_degree", degree, want) from None
    blocks = [f"layers.{i}" for i in range(args.n_layers)]
    ordered = [*chain(*stages)] == ["tok_embeddings", *blocks, "norm", "output"]
    filled = all(stages) and all(stage[0] in blocks for stage in stages[1:-1])
    ends = stages[-1][-2:] == ["norm", "output"]
    want = (
        f"{wanted} stages which list tok_embeddings, layers.0 to layers.{args.n_layers - 1}, "
        "norm and output once each and in this order, norm beside output"
    )
    fits = len(stages) == wanted and ordered and filled and ends
    require(fits, "parallelism.module_fqns_per_model_part", stages, want)
    return stages
