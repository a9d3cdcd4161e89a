# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of pipelines: schedule, split of the model, micro-batches."""

from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.stage_split import (
    SCHEDULES,
    modules_per_stage,
    stages_per_rank,
)


def check_pipeline(config: Any, world_size: int, device_type: str) -> None:
    """Check the schedule, that every stage gets blocks, and that micro-batches divide the batch."""
    section = config.parallelism
    if section.pipeline_parallel_degree == 1:
        return
    # Untested with these models, or without meaning.
    for key, value, want in (
        (
            "parallelism.pipeline_parallel_schedule_csv",
            section.pipeline_parallel_schedule_csv,
            "'' with a pipeline",
        ),
        (
            "training.enable_cpu_offload",
            config.training.enable_cpu_offload,
            "False with a pipeline",
        ),
    ):
        if value:
            raise ConfigError(key, value, want)
    if config.comm.mode == "fake_backend":
        want = "'default' with a pipeline: the one rank of a dry run has no neighbours"
        raise ConfigError("comm.mode", config.comm.mode, want)
    schedule = section.pipeline_parallel_schedule
    if schedule not in SCHEDULES:
        want = f"one of {', '.join(SCHEDULES)}"
        raise ConfigError("parallelism.pipeline_parallel_schedule", schedule, want)
    _check_split_backward(config)
    stages = _check_stages(config)
    _check_microbatches(config, stages)


def _check_split_backward(config: Any) -> None:
    """Refuse features that schedules with a split backward cannot use: it runs each graph twice."""
    schedule = config.parallelism.pipeline_parallel_schedule
    if not SCHEDULES[schedule][1]:
        return
    if config.compile.enable and "model" in config.compile.components:
        want = f"false with the schedule {schedule}: compiled blocks have one backward, not two"
        raise ConfigError("compile.enable", True, want)
    if config.parallelism.fsdp_reshard_after_forward == "always":
        want = f"'default' or 'never' with the schedule {schedule}, which needs the weights again"
        raise ConfigError("parallelism.fsdp_reshard_after_forward", "always", want)
    section = config.activation_checkpoint
    # Torch frees what it saved after the first of two recomputations.
    if section.mode == "selective" and section.selective_ac_option == "op":
        want = f"a number of blocks, as text, with the schedule {schedule}: torch repeats once only"
        raise ConfigError("activation_checkpoint.selective_ac_option", "op", want)


def _check_stages(config: Any) -> int:
    """Check the split of the model; return the number of stages."""
    from torchtitan_lr.titan.specs import get_train_spec

    section = config.parallelism
    args: Any = get_train_spec(config.model.name).model_args[config.model.flavor]
    args.update_from_config(config)
    degree, schedule = section.pipeline_parallel_degree, section.pipeline_parallel_schedule
    per_stage = section.pipeline_parallel_layers_per_stage
    key = "parallelism.pipeline_parallel_layers_per_stage"
    per_rank = stages_per_rank(section, args.n_layers)
    several, two = SCHEDULES[schedule]
    fits = per_rank == 2 if two else per_rank >= 2 if several else per_rank == 1
    if not fits or per_rank != int(per_rank):
        number = "2 stages" if two else "2 or more stages" if several else "1 stage"
        want = f"one that gives each of the {degree} ranks {number} under {schedule}"
        raise ConfigError(key, per_stage, f"{want}; this makes {per_rank:g} a rank")
    try:
        names = modules_per_stage(config, args.n_layers)
    except ValueError:
        stages = degree * int(per_rank)
        want = f"fewer stages than {stages}, into which {args.n_layers} blocks do not go"
        raise ConfigError("parallelism.pipeline_parallel_degree", degree, want) from None
    _check_names(names, args.n_layers, degree * int(per_rank))
    return len(names)


def _check_names(stages: list[list[str]], n_layers: int, wanted: int) -> None:
    """Check that modules occur once, in order, and that every inner stage has a block."""
    blocks = [f"layers.{i}" for i in range(n_layers)]
    flat = [name for stage in stages for name in stage]
    ordered = flat == ["tok_embeddings", *blocks, "norm", "output"]
    filled = all(name in blocks for stage in stages[1:-1] for name in stage[:1])
    ends = stages[-1][-2:] == ["norm", "output"] and all(stages)
    if len(stages) != wanted or not (ordered and filled and ends):
        want = (
            f"{wanted} stages which list tok_embeddings, layers.0 to layers.{n_layers - 1}, norm "
            "and output once each and in this order, norm beside output"
        )
        raise ConfigError("parallelism.module_fqns_per_model_part", stages, want)


def _check_microbatches(config: Any, stages: int) -> None:
    section, batch = config.parallelism, config.training.local_batch_size
    key = "parallelism.pipeline_parallel_microbatch_size"
    size = section.pipeline_parallel_microbatch_size
    if size < 1 or batch % size:
        want = f"a divisor of training.local_batch_size ({batch})"
        raise ConfigError(key, size, want)
    schedule, microbatches = section.pipeline_parallel_schedule, batch // size
    if schedule == "1F1B" and microbatches < stages:
        want = f"one that makes at least {stages} micro-batches, one a stage, of {batch} sequences"
        raise ConfigError(key, size, want)
    rounds = max(1, microbatches // section.pipeline_parallel_degree)
    if schedule == "Interleaved1F1B" and microbatches % rounds:
        want = f"one that makes a multiple of {rounds} micro-batches of {batch} sequences"
        raise ConfigError(key, size, want)
