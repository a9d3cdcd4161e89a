# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a run's ranks compute, how many there are, and whether its degrees fit them.

``NGPU`` sets the number of ranks. Without it, a machine with GPUs gets one rank per GPU, at most
:data:`DEFAULT_RANKS`, and a machine without GPUs gets that many CPU processes. The main job trains
the same batches on all of them: its tensor-parallel degree is lowered where it does not divide the
ranks. Other configurations are never changed.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import split_arguments
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.environment import DEFAULT_RANKS, Environment, check_log_ranks

DEFAULT_CONFIG_FILE = "./train_configs/debug_cola.toml"
"""The main job: what the launcher runs without ``CONFIG_FILE``."""

_TP, _BATCH = "parallelism.tensor_parallel_degree", "training.global_batch_size"


@dataclass(frozen=True)
class Placement:
    """The ranks of a run and what they are started with.

    Args:
        environment: The launch's environment with the final number of ranks.
        arguments: The command line, with the overrides that fit the main job to the ranks.
        config: Result of :func:`build_job_config` for ``arguments``.
        device: ``cuda``, ``xpu`` or ``cpu``.
        note: One line on what was chosen; empty if nothing was.
    """

    environment: Environment
    arguments: list[str]
    config: Any
    device: str
    note: str


def place(environment: Environment, arguments: list[str]) -> Placement:
    """Choose the device and the number of a run's ranks, and fit the main job to them.

    Raises:
        ConfigError: The configuration cannot be read, there are fewer GPUs than requested ranks,
            or the tensor-parallel degree does not divide the ranks. The message names the override
            that works.
    """
    config = build_job_config(arguments)
    count = _accelerator()[1]
    wanted = environment.ranks
    # With several machines nothing is chosen: all of them must start alike.
    free = not (environment.ranks_given or environment.comm_mode or environment.nodes > 1)
    if free and 0 < count < wanted:
        fits = (n for n in range(count, 0, -1) if _fitting_degree(config, arguments, n) is not None)
        ranks = next(fits, count)
        check_log_ranks(environment.log_ranks, ranks)
        environment = replace(environment, ranks=ranks)
    device = find_device(environment)
    overrides = []
    if environment.nodes == 1:
        overrides = _fit(config, arguments, environment.ranks, environment.ranks < wanted)
    if overrides:
        arguments = [*arguments, *overrides]
        config = build_job_config(arguments)
    _refuse_tensor_parallel(config, environment.world_size)
    note = _note(environment, count, environment.ranks < wanted, overrides) if free else ""
    if overrides and not note:
        note = f"{_count(environment.ranks, 'rank')}: training with {' '.join(overrides)}"
    return Placement(environment, arguments, config, device, note)


def find_device(environment: Environment) -> str:
    """Return the device type of the ranks: ``cuda``, ``xpu`` or ``cpu``.

    Args:
        environment: The launch's environment; a dry run needs one GPU whatever ``NGPU`` is.

    Raises:
        ConfigError: There are GPUs, but fewer than ranks.
    """
    name, count = _accelerator()
    if count and environment.ranks > count and not environment.comm_mode:
        hide = "CUDA_VISIBLE_DEVICES=" if name == "cuda" else "ZE_AFFINITY_MASK="
        want = f"at most {count}, the GPUs of this machine (or {hide} to train on the CPU)"
        raise ConfigError("NGPU", environment.ranks, want)
    return name


def _accelerator() -> tuple[str, int]:
    """Return the type and number of this machine's accelerators; ``cpu`` and 0 without any."""
    import torch

    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name, module.device_count()
    return "cpu", 0


def _fit(config: Any, arguments: list[str], ranks: int, chosen: bool) -> list[str]:
    """Return the overrides with which the main job trains its batches on any number of ranks."""
    degree = _fitting_degree(config, arguments, ranks)
    lowered = degree != _degree(config)
    if degree is None or not (lowered or chosen) or not _is_main_job(config):
        return []
    overrides = [f"--{_TP}={degree}"] if lowered else []
    if config.training.global_batch_size == -1:
        overrides.append(f"--{_BATCH}={_default_batch(config)}")
    return overrides


def _fitting_degree(config: Any, arguments: list[str], ranks: int) -> int | None:
    """Return the tensor-parallel degree with which a configuration fits the ranks; None if none.

    That of the main job is the largest divisor that divides the ranks, unless the command line sets
    it, and its batches must be those of the default number of ranks.
    """
    degree, others = _degree(config), _others(config)
    if ranks % others:
        return None
    given = any(override.key == _TP for override in split_arguments(arguments))
    lowered = degree if given or degree < 1 else math.gcd(degree, ranks // others)
    fits = lowered == degree
    if _is_main_job(config):
        fits = _keeps_batches(config, lowered, ranks)
    return lowered if fits else None


def _keeps_batches(config: Any, degree: int, ranks: int) -> bool:
    """Whether the ranks, with a tensor-parallel degree, can share the batches of the main job."""
    layout, section = config.parallelism, config.training
    split = degree * layout.pipeline_parallel_degree * layout.context_parallel_degree
    if split < 1 or ranks % split:
        return False
    batch, unit = section.global_batch_size, section.local_batch_size * (ranks // split)
    if batch == -1:
        batch = _default_batch(config)
    return unit > 0 and batch % unit == 0


def _is_main_job(config: Any) -> bool:
    main = (DEFAULT_CONFIG_FILE, find_config(DEFAULT_CONFIG_FILE))
    return os.path.realpath(config.job.config_file or "") in map(os.path.realpath, main)


def _degree(config: Any) -> int:
    return int(config.parallelism.tensor_parallel_degree)


def _others(config: Any) -> int:
    """Return the product of the degrees besides the tensor-parallel one."""
    return least_ranks(vars(config.parallelism) | {"tensor_parallel_degree": 1})


def _default_batch(config: Any) -> int:
    """Return the sequences per step on the default number of ranks."""
    section = config.parallelism
    split = section.tensor_parallel_degree, section.pipeline_parallel_degree
    copies = math.prod(max(1, degree) for degree in (*split, section.context_parallel_degree))
    return int(config.training.local_batch_size) * max(1, DEFAULT_RANKS // copies)


def _refuse_tensor_parallel(config: Any, ranks: int) -> None:
    """Refuse a tensor-parallel degree that does not divide the ranks, with one that does."""
    degree, others = _degree(config), _others(config)
    if degree > 0 and ranks % others == 0 and ranks // others % degree:
        fits = math.gcd(degree, ranks // others)
        want = f"a divisor of {ranks // others} on {_count(ranks, 'rank')}, as in --{_TP}={fits}"
        raise ConfigError(_TP, degree, want)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _note(environment: Environment, gpus: int, chosen: bool, overrides: list[str]) -> str:
    if not gpus:
        return f"no GPU here: training on {environment.ranks} CPU processes"
    if not chosen:
        return ""
    changed = f", with {' '.join(overrides)}" if overrides else ""
    return f"{_count(gpus, 'GPU')} here: training on {_count(environment.ranks, 'rank')}{changed}"
