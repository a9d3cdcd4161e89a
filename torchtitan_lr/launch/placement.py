# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a run's ranks compute, how many there are, and whether its degrees fit them.

``NGPU`` sets the number of ranks. Without it, a machine with GPUs gets one rank per GPU, at most
:data:`DEFAULT_RANKS`, and a machine without GPUs gets that many CPU processes. The shipped debug
files train the same batches on all of them: `fit` lowers what does not divide the ranks. Other
configurations are never changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import split_arguments
from torchtitan_lr.config.paths import shipped_configs
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.environment import Environment, check_log_ranks

DEFAULT_CONFIG_FILE = "./train_configs/debug_cola.toml"
"""The main job: what the launcher runs without ``CONFIG_FILE``."""

_LOCAL = "training.local_batch_size"

_LOWERED = ("tensor_parallel_degree", "data_parallel_replicate_degree")
"""Degrees of a debug file that follow the ranks."""

_DATA = ("data_parallel_replicate_degree", "data_parallel_shard_degree")


@dataclass(frozen=True)
class Placement:
    """The ranks of a run and what they are started with."""

    environment: Environment  # with the final number of ranks
    arguments: list[str]  # with the overrides that fit a debug file to the ranks
    config: Any  # of ``arguments``
    device: str  # ``cuda``, ``xpu`` or ``cpu``
    note: str  # what was chosen, in one line; may be empty


def place(environment: Environment, arguments: list[str]) -> Placement:
    """Choose the device and the number of a run's ranks, and fit a debug file to them.

    Raises:
        ConfigError: The configuration cannot be read, or there are fewer GPUs than requested ranks.
    """
    config, count, wanted = build_job_config(arguments), accelerator()[1], environment.ranks
    # With several machines nothing is chosen: all of them must start alike.
    free = not (environment.ranks_given or environment.comm_mode or environment.nodes > 1)
    if free and 0 < count < wanted:
        fits = (n for n in range(count, 0, -1) if fit(config, arguments, n) is not None)
        ranks = next(fits, count)
        check_log_ranks(environment.log_ranks, ranks)
        environment = replace(environment, ranks=ranks)
    device, ranks = find_device(environment), environment.ranks
    overrides = fit(config, arguments, ranks) if environment.nodes == 1 else []
    if overrides:
        arguments = [*arguments, *overrides]
        config = build_job_config(arguments)
    notes = []
    if overrides or (free and (not count or ranks < wanted)):
        where = f"{_count(count, 'GPU')} here: " if count else "no GPU here: "
        what = f"training on {_count(ranks, 'rank')}" + (" with " * bool(overrides))
        notes.append(where * free + what + " ".join(overrides or []))
    if config.grad_compression.codec != "none" and environment.world_size > 1:
        notes.append("each rank compresses its own gradients: losses depend on the number of ranks")
    return Placement(environment, arguments, config, device, "; ".join(notes))


def find_device(environment: Environment) -> str:
    """Return the device type of the ranks; a dry run needs one GPU, whatever ``NGPU`` is.

    Raises:
        ConfigError: There are GPUs, but fewer than ranks.
    """
    name, count = accelerator()
    if count and environment.ranks > count and not environment.comm_mode:
        hide = "CUDA_VISIBLE_DEVICES=" if name == "cuda" else "ZE_AFFINITY_MASK="
        want = f"at most {count}, the GPUs of this machine (or {hide} to train on the CPU)"
        raise ConfigError("NGPU", environment.ranks, want)
    return name


def accelerator() -> tuple[str, int]:
    """Return the type and number of this machine's accelerators; ``cpu`` and 0 without any."""
    import torch

    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name, module.device_count()
    return "cpu", 0


def fit(config: Any, arguments: Sequence[str], ranks: int) -> list[str] | None:
    """Return the overrides with which a configuration fits the ranks; None if none do.

    Only a debug file gets some, for keys that the command line does not set: its degrees of tensor
    parallelism and of replicas are lowered to divisors of the ranks, and then the local batch, so
    that the ranks share the sequences of a step.
    """
    layout, training = dict(vars(config.parallelism)), config.training
    given = {override.key for override in split_arguments(list(arguments))}
    overrides: dict[str, int] = {}
    for name in _LOWERED if _is_debug(config) else ():
        key, others = f"parallelism.{name}", least_ranks(layout | {name: 1})
        if key not in given and layout[name] > 1 and ranks % others == 0:
            lowered = math.gcd(layout[name], ranks // others)
            if lowered != layout[name]:
                overrides[key] = layout[name] = lowered
    if ranks % least_ranks(layout):
        return None
    batch, local = training.global_batch_size, training.local_batch_size
    apart = least_ranks(layout | dict.fromkeys(_DATA, 1))  # ranks that share their rows
    if _is_debug(config) and batch > 0 and batch % max(1, local * (ranks // apart)):
        if batch % (ranks // apart) or _LOCAL in given:
            return None
        overrides[_LOCAL] = math.gcd(local, batch // (ranks // apart))
    return [f"--{key}={value}" for key, value in overrides.items()]


def _is_debug(config: Any) -> bool:
    """Whether a configuration is one of the shipped debug files, of which the main job is one."""
    path = Path(config.job.config_file or "")
    shipped = shipped_configs().get(path.stem) if path.stem.startswith("debug_") else None
    return shipped is not None and shipped.resolve() == path.resolve()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
