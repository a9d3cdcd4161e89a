# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of what goes together: degrees, plans, optimizer and codec with model, ranks and device.

What torch and torchtitan refuse when they build a run is left to them.
"""

import math
from itertools import chain
from typing import Any

from torchtitan_lr.config.schema import Optimizer
from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.configured import configured_args, llama_args, model_shapes
from torchtitan_lr.optim.entries import ENTRIES, imported
from torchtitan_lr.parallel.stage_split import SCHEDULES, modules_per_stage, stages_per_rank, takes
from torchtitan_lr.titan import logger


def check_parallelism(config: Any, world_size: int, device_type: str) -> None:
    """Check that the degrees of parallelism multiply to the world size."""
    sections, rest = config.parallelism, world_size
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    for name in names:
        degree = getattr(sections, f"{name}_degree")
        if degree <= 0 or rest % degree:
            most = min(rest, 1 << 16)
            divisors = ", ".join(str(n) for n in range(1, most + 1) if rest % n == 0)
            want = f"a divisor of the {rest} ranks: {divisors}"
            raise ConfigError(f"parallelism.{name}_degree", degree, want)
        rest //= degree
    shard = sections.data_parallel_shard_degree
    want = f"-1 or {rest}, so that all degrees multiply to the {world_size} ranks"
    require(shard in (-1, rest), "parallelism.data_parallel_shard_degree", shard, want)
    fits = not config.training.enable_cpu_offload or rest > 1
    want = "false unless FSDP shards: parallelism.data_parallel_shard_degree is 1 here"
    require(fits, "training.enable_cpu_offload", True, want)


def check_plans(config: Any, world_size: int, device_type: str) -> None:
    """Check that the model fits the tensor-parallel plan, at degree 1 too, and the optimizer."""
    from torchtitan_lr.optim.spectral.matrices import select_matrices
    from torchtitan_lr.parallel.plans import check_gather, tp_settings

    args = llama_args(config)
    if args is None:  # another package's model: it has a plan of its own, and the ranks check it
        return
    sections, entry = config.parallelism, ENTRIES[config.optimizer.name]
    degree = sections.tensor_parallel_degree
    settings = tp_settings(config, args, degree)
    check_gather(sections.cp_gather, args, settings, degree)
    if settings.comm != sections.tp_comm:
        logger.warning(
            "parallelism.tp_comm falls back from 'sequence' to 'all_reduce': "
            f"{degree} ranks cannot share the tokens of every training and validation row evenly"
        )
    shapes = model_shapes(args)
    if entry.updates != "all":
        want = "'Muon' or 'AdamW' for a model without low-rank factors"
        require(select_matrices(shapes, entry.updates).names, "optimizer.name", entry.name, want)
    if entry.fits is not None:
        imported(entry.fits)(config.optimizer, shapes)


def check_context(config: Any, world_size: int, device_type: str) -> None:
    """Check that context-parallel ranks can share every row, and that they have the kernels."""
    parallelism, args = config.parallelism, llama_args(config)
    degree, key = parallelism.context_parallel_degree, "parallelism.context_parallel_degree"
    if degree == 1:
        return
    if args is None:
        raise ConfigError(key, degree, "1 for a model of another package")
    if device_type != "cpu":
        # The other kernels materialize the mask, or ignore that queries are grouped.
        half = config.training.mixed_precision_param in ("bfloat16", "float16")
        fits = half and args.head_dim <= 256 and args.head_dim % 8 == 0 and device_type == "cuda"
        want = "1, unless flash attention fits: CUDA, training.mixed_precision_param = 'bfloat16' "
        want += f"or 'float16', heads of 8, 16, … 256 features (these have {args.head_dim})"
        require(fits, key, degree, want)
    unit, product = 2 * degree, f"2 * {key} ({degree})"
    if parallelism.tp_comm == "sequence":
        unit *= parallelism.tensor_parallel_degree
        product += f" * tensor_parallel_degree ({parallelism.tensor_parallel_degree})"
    for section in ("training", "validation"):
        seq_len = getattr(config, section).seq_len
        fits = seq_len % unit == 0 or (section == "validation" and not config.validation.enable)
        require(fits, f"{section}.seq_len", seq_len, f"a multiple of {unit}: {product}")


def check_checkpointing(config: Any, world_size: int, device_type: str) -> None:
    """Check activation checkpointing with and without ``[compile]``."""
    from torchtitan_lr.parallel.checkpoint_modes import COMPILES_ON_CPU, check_mode, compiles_model

    check_mode(config)
    mode, degree = config.activation_checkpoint.mode, config.parallelism.tensor_parallel_degree
    # torch 2.13 cannot compile tensor-parallel blocks on a CPU if they recompute attention.
    compiles = device_type == "cpu" and degree > 1 and compiles_model(config)
    want = f"{' or '.join(map(repr, COMPILES_ON_CPU))} with compile.enable and tensor parallelism"
    fits = mode in COMPILES_ON_CPU or not compiles
    require(fits, "activation_checkpoint.mode", mode, f"{want} on a CPU")


def check_step_graph(config: Any, world_size: int, device_type: str) -> None:
    """Refuse to capture what cannot be captured, where that is asked for."""
    from torchtitan_lr.parallel.capture import why_eager

    if config.training.step_graph == "on":
        reason = why_eager(config, world_size, device_type)
        require(not reason, "training.step_graph", "on", f"'auto': {reason}")


def check_profiling(config: Any, world_size: int, device_type: str) -> None:
    """Check that ``[profiling]`` finds what it looks for."""
    fits = device_type != "cpu" or not config.profiling.enable_memory_snapshot
    require(fits, "profiling.enable_memory_snapshot", True, "false on a CPU")
    section = config.profiling
    least, every = section.profiler_warmup + section.profiler_active, section.profile_freq
    want = f"profiler_warmup + profiler_active, {least}, or more"
    require(every >= least or not section.enable_profiling, "profiling.profile_freq", every, want)


def check_optimizer(config: Any, world_size: int, device_type: str) -> None:
    """Check that the optimizer fits the run and reads its keys; every group has a parameter."""
    # Imported late because they import torch.
    from torchtitan_lr.compression.settings import merged
    from torchtitan_lr.optim.groups import check_patterns

    section, args, entry = config.optimizer, llama_args(config), ENTRIES[config.optimizer.name]
    if args is not None and entry.check is not None:
        imported(entry.check)(config, world_size, device_type)
    if entry.rates is not None:
        least, most, source = entry.rates
        if not least <= section.lr <= most:
            logger.warning(
                "optimizer.lr = %g is beyond the rates of %s that are known to work, %g to %g (%s)",
                *(section.lr, entry.name, least, most, source),
            )
    # Offloading leaves the state on the host.
    fits = not (config.training.enable_cpu_offload and entry.sends_state)
    require(fits, "training.enable_cpu_offload", True, f"false with {entry.name}")
    if args is None or not entry.reads_groups:
        what = f"optimizer.name = {entry.name!r}, registered without reads_groups = True"
        if args is None:  # another package's, which builds its own optimizer
            what = f"model.name = {config.model.name!r}"
        for name in ("groups", "weight_decay_on", "adamw_lr", "adamw_weight_decay"):
            key, got = f"optimizer.{name}", getattr(section, name)
            default = entry.defaults_of(config.model.name).get(key, getattr(Optimizer(), name))
            require(got == default, key, got, f"{default!r} with {what}")
        return
    if section.groups:
        names = list(model_shapes(args))
        check_patterns(names, section, merged(names))


def check_outer(config: Any, world_size: int, device_type: str) -> None:
    """Check that outer steps fit the run, its layers, and what sums gradients over replicas."""
    section, training, entry = config.outer, config.training, ENTRIES[config.optimizer.name]
    if not section.every:
        return
    want = f"at most training.steps ({training.steps}), or 0"
    fits = section.every <= training.steps or training.steps == 1  # a dry run, or a counted step
    require(fits, "outer.every", section.every, want)
    args, fragments = llama_args(config), section.fragments
    most = min(section.every, args.n_layers if args else 1)
    want = f"at most {most}: fragments are of whole layers, exchanged in steps of their own"
    require(fragments <= most, "outer.fragments", fragments, want)
    want = f"0 with {entry.name}, which sums over the replicas by itself in every step"
    require(not entry.sums_replicas, "outer.every", section.every, want)
    codec = config.grad_compression.codec
    want = "'none' with outer.every > 0: a codec inside a replica is not tested"
    require(codec == "none", "grad_compression.codec", codec, want)
    offload, want = training.enable_cpu_offload, "false with outer.every > 0"
    require(not offload, "training.enable_cpu_offload", offload, want)
    want = "'float32' with outer.every > 0, whose sums have it"
    require(training.dtype != "bfloat16", "training.dtype", training.dtype, want)


def check_pipeline(config: Any, world_size: int, device_type: str) -> None:
    """Check the schedule, and what would train another model or fail in the first backward."""
    section, recomputation = config.parallelism, config.activation_checkpoint
    if section.pipeline_parallel_degree == 1:
        return
    schedule = section.pipeline_parallel_schedule
    want = one_of(SCHEDULES, schedule)
    require(schedule in SCHEDULES, "parallelism.pipeline_parallel_schedule", schedule, want)
    # Without meaning, or untested with these models.
    table, offload = section.pipeline_parallel_schedule_csv, config.training.enable_cpu_offload
    require(not table, "parallelism.pipeline_parallel_schedule_csv", table, "'' with a pipeline")
    require(not offload, "training.enable_cpu_offload", True, "false with a pipeline")
    want = "'default' with a pipeline: `torchtitan-lr check` rehearses a rank of each stage"
    require(config.comm.mode != "fake_backend", "comm.mode", config.comm.mode, want)
    if SCHEDULES[schedule][1]:  # backward in two halves, which run each graph twice
        compiled = config.compile.enable and "model" in config.compile.components
        want = f"false with {schedule}: compiled blocks have one backward, not two"
        require(not compiled, "compile.enable", True, want)
        reshard = section.fsdp_reshard_after_forward
        want = f"'default' or 'never' with {schedule}, which needs the weights again"
        require(reshard != "always", "parallelism.fsdp_reshard_after_forward", reshard, want)
        # Torch frees what it saved after the first of two recomputations.
        single = recomputation.mode == "selective" and recomputation.selective_ac_option == "op"
        want = f"a number of blocks, as text, with {schedule}: torch repeats once only"
        require(not single, "activation_checkpoint.selective_ac_option", "op", want)
    _check_stages(config)
    size, batch = section.pipeline_parallel_microbatch_size, config.training.local_batch_size
    want = f"a divisor of training.local_batch_size ({batch})"
    key = "parallelism.pipeline_parallel_microbatch_size"
    require(size > 0 and batch % size == 0, key, size, want)
    degree = section.pipeline_parallel_degree
    want = f"one that makes {degree} micro-batches, or a multiple, of the {batch} rows of"
    want += f" training.local_batch_size for {schedule}"
    require(takes(schedule, degree, batch // size), key, size, want)


def _check_stages(config: Any) -> None:
    """Check that the split has each module once, in order, and a block in every inner stage."""
    section, n_layers = config.parallelism, configured_args(config).n_layers
    degree, schedule = section.pipeline_parallel_degree, section.pipeline_parallel_schedule
    per_rank, (several, two) = stages_per_rank(section, n_layers), SCHEDULES[schedule]
    number = "2 stages" if two else "2 or more stages" if several else "1 stage"
    fits = per_rank == 2 if two else per_rank >= 2 if several else per_rank == 1
    want = f"one that gives each of the {degree} ranks {number} under {schedule}"
    key, layers = "pipeline_parallel_layers_per_stage", section.pipeline_parallel_layers_per_stage
    require(fits and per_rank == int(per_rank), f"parallelism.{key}", layers, want)
    wanted = degree * int(per_rank)
    try:
        stages = modules_per_stage(config, n_layers)
    except ValueError:
        want = f"fewer stages than {wanted}, into which {n_layers} blocks do not go"
        raise ConfigError("parallelism.pipeline_parallel_degree", degree, want) from None
    blocks = [f"layers.{i}" for i in range(n_layers)]
    ordered = [*chain(*stages)] == ["tok_embeddings", *blocks, "norm", "output"]
    filled = all(stages) and all(stage[0] in blocks for stage in stages[1:-1])
    fits = len(stages) == wanted and ordered and filled and stages[-1][-2:] == ["norm", "output"]
    want = f"{wanted} stages which list tok_embeddings, layers.0 to layers.{n_layers - 1}, norm and"
    want += " output once each and in this order, norm beside output"
    require(fits, "parallelism.module_fqns_per_model_part", stages, want)


def check_compression(config: Any, world_size: int, device_type: str) -> None:
    """Check a codec's layout, and that some tensor is selected."""
    section, parallelism = config.grad_compression, config.parallelism
    if section.codec == "none":
        return
    replicate = parallelism.data_parallel_replicate_degree
    shard = world_size // parallelism.tensor_parallel_degree // replicate
    want = ""
    if parallelism.pipeline_parallel_degree > 1:
        want = "'none' with pipeline_parallel_degree > 1"
    elif replicate > 1 and shard == 1:
        want = "'none' unless FSDP shards: parallelism.data_parallel_shard_degree is 1 here"
    elif ENTRIES[config.optimizer.name].sums_replicas:
        want = f"'none' with optimizer.name = {config.optimizer.name!r}, which reduces by itself"
    require(not want, "grad_compression.codec", section.codec, want)
    ranks = replicate if replicate > 1 else max(1, shard)
    # Imported late because it imports torch.
    from torchtitan_lr.compression.settings import compression_settings, is_compressed

    settings, args = compression_settings(config, ranks), llama_args(config)
    if args is None:  # another package's model: the ranks check it
        return
    sizes = {name: math.prod(shape) for name, shape in model_shapes(args).items()}
    selected = any(is_compressed(name, size, settings) for name, size in sizes.items())
    want = "the size of some tensor of this model, or less"
    require(selected, "grad_compression.min_size", section.min_size, want)
