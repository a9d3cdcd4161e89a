# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks for torchtitan features that this package, or the device, does not support."""

import math
import os
import shutil
from collections.abc import Callable
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.configured import llama_args


def check_parallelism(config: Any, world_size: int, device_type: str) -> None:
    """Check that the data, tensor and pipeline degrees multiply to the world size."""
    sections = config.parallelism
    for name in ("context", "expert", "expert_tensor"):
        key = f"{name}_parallel_degree"
        degree = getattr(sections, key)
        if degree != 1:
            want = "1: only data, tensor and pipeline parallelism are supported in this version"
            raise ConfigError(f"parallelism.{key}", degree, want)
    if sections.enable_async_tensor_parallel:
        want = "false: the plans are untested with it (it fuses products and collectives on CUDA)"
        raise ConfigError("parallelism.enable_async_tensor_parallel", True, want)
    rest, others = world_size, []
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel_replicate"):
        degree = getattr(sections, f"{name}_degree")
        _check_degree(f"{name}_degree", degree, rest)
        rest //= degree
        others.append(f"{name}_degree ({degree})")
    shard = sections.data_parallel_shard_degree
    if shard not in (-1, rest):
        want = (
            f"-1 or {rest}, so that {', '.join(reversed(others))} and it multiply to the "
            f"{world_size} ranks"
        )
        raise ConfigError("parallelism.data_parallel_shard_degree", shard, want)
    if config.training.enable_cpu_offload and rest < 2 and device_type != "cpu":
        want = "false unless FSDP shards: parallelism.data_parallel_shard_degree is 1 here"
        raise ConfigError("training.enable_cpu_offload", True, want)


def check_tensor_parallel(config: Any, world_size: int, device_type: str) -> None:
    """Check that the tensor-parallel plan fits the model, also at degree 1."""
    from torchtitan_lr.parallel.plans import tp_settings

    args = llama_args(config)
    if args is not None:  # else another package's model, with a plan of its own
        tp_settings(config, args, config.parallelism.tensor_parallel_degree)


def _check_degree(name: str, degree: int, ranks: int) -> None:
    if degree <= 0 or ranks % degree:
        small = [n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0]
        divisors = sorted({*small, *(ranks // n for n in small)})
        want = f"a divisor of the {ranks} ranks: {', '.join(map(str, divisors))}"
        raise ConfigError(f"parallelism.{name}", degree, want)


def check_unsupported(config: Any, world_size: int, device_type: str) -> None:
    """Refuse features of torchtitan that this package does not support."""
    refused = (
        ("model.converters", config.model.converters, "an empty list: no float8 or MX here"),
        ("optimizer.early_step_in_backward", config.optimizer.early_step_in_backward, "false"),
        ("memory_estimation.enable", config.memory_estimation.enable, "false: not supported"),
    )
    for key, value, want in refused:
        if value:
            raise ConfigError(key, value, want)
    if config.comm.mode == "local_tensor":
        raise ConfigError("comm.mode", "local_tensor", "'default' or 'fake_backend'")


def check_activation_checkpoint(config: Any, world_size: int, device_type: str) -> None:
    """Check the values of ``[activation_checkpoint]`` and what its mode needs."""
    from torchtitan_lr.parallel.recompute import check_mode

    section = config.activation_checkpoint
    option = section.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        want = "'op', or every how many blocks, as text, such as '2'"
        raise ConfigError("activation_checkpoint.selective_ac_option", option, want)
    if section.determinism_check not in ("default", "none"):
        want = "'default' or 'none'"
        raise ConfigError(
            "activation_checkpoint.determinism_check", section.determinism_check, want
        )
    check_mode(config)


def check_compile(config: Any, world_size: int, device_type: str) -> None:
    """Check the components and the backend of ``[compile]``."""
    section = config.compile
    for component in section.components:
        if component not in ("model", "loss"):
            raise ConfigError("compile.components", component, "'model' and/or 'loss'")
    if not section.enable:
        return
    import torch

    backends = torch.compiler.list_backends(exclude_tags=())
    if section.backend not in backends:
        want = f"one of {', '.join(backends)}"
        raise ConfigError("compile.backend", section.backend, want)
    compiler = os.environ.get("CXX", "g++").split()[0]
    if device_type == "cpu" and section.backend == "inductor" and shutil.which(compiler) is None:
        want = f"false on a CPU without the C++ compiler {compiler} (CXX names another)"
        raise ConfigError("compile.enable", True, want)


def check_cpu(config: Any, world_size: int, device_type: str) -> None:
    """Refuse settings that need an accelerator on a CPU."""
    if device_type != "cpu":
        return
    needs_accelerator = (
        ("profiling", "enable_profiling", True, "false"),
        ("profiling", "enable_memory_snapshot", True, "false"),
        ("checkpoint", "async_mode", "async_with_pinned_mem", "'disabled' or 'async'"),
        ("training", "enable_cpu_offload", True, "false"),
    )
    for section, name, refused, want in needs_accelerator:
        if getattr(getattr(config, section), name) == refused:
            raise ConfigError(f"{section}.{name}", refused, f"{want} on a CPU")


def check_compiled_checkpointing(config: Any, world_size: int, device_type: str) -> None:
    """Refuse modes with which torch 2.13 cannot compile tensor-parallel blocks on a CPU.

    These are the modes that recompute attention.
    """
    from torchtitan_lr.parallel.recompute import MODES, compiles_model

    mode = MODES[config.activation_checkpoint.mode]
    tensor_parallel = config.parallelism.tensor_parallel_degree > 1
    if device_type != "cpu" or not tensor_parallel or not compiles_model(config):
        return
    if not mode.compiles_on_cpu:
        others = [repr(other.name) for other in MODES.values() if other.compiles_on_cpu]
        want = f"{' or '.join(others)} with compile.enable and tensor parallelism on a CPU"
        raise ConfigError("activation_checkpoint.mode", mode.name, want)


SUPPORT_CHECKS: tuple[Callable[[Any, int, str], None], ...] = (
    check_unsupported,
    check_parallelism,
    check_activation_checkpoint,
    check_compile,
    check_compiled_checkpointing,
    check_cpu,
)
"""The checks of features, in the order of ``check_job_config``."""
