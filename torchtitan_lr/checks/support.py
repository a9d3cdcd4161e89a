# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks of degrees, plans and features against the ranks, the model and the device."""

import math
import operator
import os
import shutil
from typing import Any

from torchtitan_lr.errors import ConfigError, one_of, require
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.optim.entries import ENTRIES, imported
from torchtitan_lr.titan import logger


def check_parallelism(config: Any, world_size: int, device_type: str) -> None:
    """Check that the degrees of parallelism multiply to the world size."""
    sections = config.parallelism
    rest, others = world_size, []
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    for name in names:
        degree = getattr(sections, f"{name}_degree")
        if degree <= 0 or rest % degree:
            # Up to the square root only: a typing error may ask for 10**12 ranks.
            small = [n for n in range(1, math.isqrt(rest) + 1) if rest % n == 0]
            divisors = sorted({*small, *(rest // n for n in small)})
            want = f"a divisor of the {rest} ranks: {', '.join(map(str, divisors))}"
            raise ConfigError(f"parallelism.{name}_degree", degree, want)
        rest //= degree
        others.append(f"{name}_degree ({degree})")
    shard = sections.data_parallel_shard_degree
    known = f"{', '.join(reversed(others))} and it multiply to the {world_size} ranks"
    want = f"-1 or {rest}, so that {known}"
    require(shard in (-1, rest), "parallelism.data_parallel_shard_degree", shard, want)
    fits = not config.training.enable_cpu_offload or rest > 1 or device_type == "cpu"
    want = "false unless FSDP shards: parallelism.data_parallel_shard_degree is 1 here"
    require(fits, "training.enable_cpu_offload", True, want)


def check_plans(config: Any, world_size: int, device_type: str) -> None:
    """Check that the model fits the tensor-parallel plan, at degree 1 too, and the optimizer."""
    from torchtitan_lr.optim.spectral.selection import select_matrices
    from torchtitan_lr.parallel.plans import check_gather, tp_settings

    entry = ENTRIES[config.optimizer.name]
    fits = not (config.training.enable_cpu_offload and entry.sends_state)
    require(fits, "training.enable_cpu_offload", True, f"false with {entry.name}")
    args = llama_args(config)
    if args is None:  # another package's model: it has a plan of its own, and the ranks check it
        return
    sections = config.parallelism
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
    require(device_type != "xpu", key, degree, "1 on an XPU: only CUDA and a CPU are supported")
    if device_type == "cuda":
        # The other kernels materialize the mask, or ignore that queries are grouped.
        dtype = config.training.mixed_precision_param
        want = f"1 on a GPU in {dtype}: flash attention has bfloat16 (training."
        want += "mixed_precision_param) and float16 alone"
        require(dtype in ("bfloat16", "float16"), key, degree, want)
        fits = args.head_dim <= 256 and args.head_dim % 8 == 0
        want = (
            f"1 on a GPU with heads of {args.head_dim} features: flash attention has 8, 16, … 256"
        )
        require(fits, key, degree, want)
    unit, product = 2 * degree, f"2 * {key} ({degree})"
    if parallelism.tp_comm == "sequence":
        unit *= parallelism.tensor_parallel_degree
        product += f" * tensor_parallel_degree ({parallelism.tensor_parallel_degree})"
        product += " with tp_comm = 'sequence'"
    rows = {"training": config.training.seq_len}
    if config.validation.enable:
        rows["validation"] = config.validation.seq_len
    for section, seq_len in rows.items():
        want = f"a multiple of {unit}: {product}"
        require(seq_len % unit == 0, f"{section}.seq_len", seq_len, want)


def check_compile(config: Any, world_size: int, device_type: str) -> None:
    """Check ``[compile]``, and what activation checkpointing needs with and without it."""
    from torchtitan_lr.parallel.recompute import COMPILES_ON_CPU, check_mode, compiles_model

    mode, section = config.activation_checkpoint.mode, config.compile
    check_mode(config)
    for component in section.components:
        known = component in ("model", "loss")
        require(known, "compile.components", component, "'model' and/or 'loss'")
    if not section.enable:
        return
    import torch

    backends = torch.compiler.list_backends(exclude_tags=())
    want = one_of(backends, section.backend)
    require(section.backend in backends, "compile.backend", section.backend, want)
    if device_type != "cpu":
        return
    compiler = os.environ.get("CXX", "g++").split()[0]
    want = f"false on a CPU without the C++ compiler {compiler} (CXX names another)"
    require(section.backend != "inductor" or shutil.which(compiler), "compile.enable", True, want)
    # torch 2.13 cannot compile tensor-parallel blocks on a CPU if they recompute attention.
    tensor_parallel = config.parallelism.tensor_parallel_degree > 1
    if tensor_parallel and compiles_model(config) and mode not in COMPILES_ON_CPU:
        others = " or ".join(map(repr, COMPILES_ON_CPU))
        want = f"{others} with compile.enable and tensor parallelism on a CPU"
        raise ConfigError("activation_checkpoint.mode", mode, want)


def check_cpu(config: Any, world_size: int, device_type: str) -> None:
    """Refuse settings that need an accelerator on a CPU."""
    if device_type != "cpu":
        return
    for key, refused, want in (
        ("profiling.enable_profiling", True, "false"),
        ("profiling.enable_memory_snapshot", True, "false"),
        ("checkpoint.async_mode", "async_with_pinned_mem", "'disabled' or 'async'"),
        ("training.enable_cpu_offload", True, "false"),
    ):
        found = operator.attrgetter(key)(config)
        require(found != refused, key, refused, f"{want} on a CPU")


def check_step_graph(config: Any, world_size: int, device_type: str) -> None:
    """Refuse to capture what cannot be captured, where that is asked for."""
    from torchtitan_lr.training.step_graph import why_eager

    if config.training.step_graph == "on":
        reason = why_eager(config, device_type)
        require(not reason, "training.step_graph", "on", f"'auto': {reason}")
