# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a run's ranks compute, how many there are, and whether its degrees fit them.

`commands.train` describes the environment variables. The shipped debug files train the same batches
on any number of ranks: `fit` lowers what does not divide them. Other configurations are never
changed.
"""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lr.checks.job import Data, check_job_config
from torchtitan_lr.compat.devices import gpu_count as gpu_count
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import split_arguments
from torchtitan_lr.config.paths import shipped_configs
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.errors import ConfigError, LostDeviceError, require

DEFAULT_RANKS = 4  # without ``NGPU``: the most GPUs, or the CPU processes of a machine without

DEFAULT_CONFIG_FILE = "./train_configs/debug_cola.toml"
"""The main job: what the launcher runs without ``CONFIG_FILE``."""

_LOCAL, _BATCH = "training.local_batch_size", "training.global_batch_size"

_LOWERED = ("tensor_parallel_degree", "data_parallel_replicate_degree")
"""Degrees of a debug file that follow the ranks."""

GPUS_VARIABLE = "TORCHTITAN_LR_GPUS"  # a machine's: clusters tell the launcher, it tells the ranks

fewer = "at most {}, the GPUs here (or CUDA_VISIBLE_DEVICES= to train on the CPU)".format
_ANSWER_SECONDS = 60  # of a driver that counts its GPUs
_DATA = ("data_parallel_replicate_degree", "data_parallel_shard_degree")


@dataclass(frozen=True)
class Environment:
    """The environment variables of a launch, checked."""

    ranks: int  # on this machine
    nodes: int  # machines; the most, if a range was given
    log_ranks: str  # whose output is shown, by their number on this machine, e.g. ``0,1``
    comm_mode: str  # torchtitan's ``comm.mode``, empty for a real run
    ranks_given: bool = True  # whether the user set ``NGPU``
    min_nodes: int | None = None  # of a range such as ``2:4``, else None
    max_restarts: int = 0  # how often failed ranks of a machine are started again
    endpoint: str = ""  # where several machines meet, ``host:port``

    @property
    def world_size(self) -> int:
        """Ranks of the whole run, with all its machines."""
        return self.ranks * self.nodes

    def shown(self) -> list[int]:
        """Return the ranks whose output is shown; a ConfigError if one is none of the machine's."""
        ranks = [rank.strip() for rank in self.log_ranks.split(",")]
        fits = all(rank.isdecimal() and int(rank) < self.ranks for rank in ranks)
        want = f"ranks from 0 to {self.ranks - 1} such as 0,1"
        require(fits, "LOG_RANK", self.log_ranks, want)
        return [int(rank) for rank in ranks]


def read_environment() -> Environment:
    """Read torchtitan's environment variables; a ConfigError names one with an invalid value."""
    comm_mode = os.environ.get("COMM_MODE", "")
    known = comm_mode in ("", "default", "fake_backend")
    require(known, "COMM_MODE", comm_mode, "'fake_backend', or leave it out")
    dry = comm_mode == "fake_backend"
    ranks = _number("NGPU", os.environ.get("NGPU") or str(DEFAULT_RANKS), 1 << 20 if dry else 1024)
    restarts = _number("MAX_RESTARTS", os.environ.get("MAX_RESTARTS") or "0", 1000, least=0)
    first, _, last = (os.environ.get("NNODES") or "1").partition(":")
    least, nodes = (_number("NNODES", text, 100_000) for text in (first, last or first))
    require(least <= nodes, "NNODES", f"{first}:{last}", f"a range such as {nodes}:{least}")
    want = f"1 or more with NNODES={first}:{last}: machines go on without others by a restart"
    require(least == nodes or restarts or dry, "MAX_RESTARTS", restarts, want)
    if dry:  # one process pretends to be a rank of them all
        ranks, least, nodes, restarts = ranks * nodes, 1, 1, 0
    endpoint = (os.environ.get("RDZV_ENDPOINT") or "").strip() if nodes > 1 else ""
    want = f"host:port of one of the {nodes} machines"
    require(nodes == 1 or endpoint, "RDZV_ENDPOINT", endpoint, want)
    return Environment(
        ranks=ranks,
        nodes=nodes,
        log_ranks=os.environ.get("LOG_RANK") or "0",
        comm_mode=comm_mode if dry else "",
        ranks_given=bool(os.environ.get("NGPU")),
        min_nodes=None if least == nodes else least,
        max_restarts=restarts,
        endpoint=endpoint,
    )


def _number(name: str, text: str, most: int, least: int = 1) -> int:
    fits = text.isdecimal() and len(text) < 10 and least <= int(text) <= most
    require(fits, name, text, f"a number from {least} to {most:,}")
    return int(text)


def granted_gpus(otherwise: int = 0) -> int:
    """Return how many GPUs this machine must have, by its cluster or by the launcher."""
    return _number(GPUS_VARIABLE, os.environ.get(GPUS_VARIABLE) or str(otherwise), 1024, least=0)


def launched_ranks(comm_mode: str) -> int:
    """Return the number of ranks that torchrun or the launcher started, or a dry run pretends."""
    name = "NGPU" if comm_mode == "fake_backend" else "WORLD_SIZE"
    want = "what torchrun sets: start with torchrun or torchtitan-lr train"
    require(os.environ.get(name), name, os.environ.get(name, ""), want)
    return int(os.environ[name])


@dataclass(frozen=True)
class Placement:
    """The ranks of a run and what they are started with."""

    environment: Environment  # with the final number of ranks
    arguments: list[str]  # with the overrides that fit a debug file to the ranks
    config: Any  # of ``arguments``
    device: str  # ``cuda`` or ``cpu``
    note: str  # what was chosen, in one line; may be empty


def place(environment: Environment, arguments: list[str]) -> Placement:
    """Choose the device and the number of a run's ranks, and fit a debug file to them."""
    config, count, wanted = build_job_config(arguments), gpu_count(), environment.ranks
    # With several machines nothing is chosen: all of them must start alike.
    free = not (environment.ranks_given or environment.comm_mode or environment.nodes > 1)
    if free and 0 < count < wanted:
        fits = (n for n in range(count, 0, -1) if fit(config, arguments, n) is not None)
        environment = replace(environment, ranks=next(fits, count))
    device, ranks = find_device(environment), environment.ranks
    overrides = fit(config, arguments, ranks) if environment.nodes == 1 else []
    notes = []
    if overrides or (free and (not count or ranks < wanted)):
        here = f"{count or 'no'} GPU{'s'[: count > 1]} here: " if free else ""
        what = f"training on {ranks} rank{'s'[: ranks > 1]}" + (" with " if overrides else "")
        notes.append(here + what + " ".join(overrides or []))
    if overrides:
        arguments = [*arguments, *overrides]
        config = build_job_config(arguments)
    if config.grad_compression.codec != "none" and environment.world_size > 1:
        notes.append("each rank compresses its own gradients: losses depend on the number of ranks")
    return Placement(environment, arguments, config, device, "; ".join(notes))


def find_device(environment: Environment) -> str:
    """Return the device type of the ranks, which are no more than GPUs where there are any."""
    count = gpu_count()
    has_gpus = granted_gpus() or count  # or lost them all
    if has_gpus and environment.ranks > count and not environment.comm_mode:  # which needs one
        raise LostDeviceError("NGPU", environment.ranks, fewer(count))
    return "cuda" if count else "cpu"


def lost_devices(ranks: int) -> str:
    """Return why ranks with GPUs cannot start here again; a new process asks the driver."""
    command = [sys.executable, "-c", f"from {__name__} import gpu_count; print(gpu_count())"]
    count = ranks
    with suppress(OSError, ValueError):  # trouble of that process is no lost GPU
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            answer, _ = process.communicate(timeout=_ANSWER_SECONDS)
            count = ranks if process.returncode else int(answer)
        except subprocess.TimeoutExpired:  # a driver that hangs
            process.kill()  # nobody waits for it: it may be deaf within the driver
            count = 0
    return str(LostDeviceError("NGPU", ranks, fewer(count))) if ranks > count else ""


def fit(config: Any, arguments: Sequence[str], ranks: int) -> list[str] | None:
    """Return the overrides with which a configuration fits the ranks; None if none do.

    Only a debug file gets some, for keys that the command line does not set: its degrees of tensor
    parallelism and of replicas are lowered to divisors of the ranks, and then the local batch, so
    that the ranks share the sequences of a step.
    """
    layout, training = dict(vars(config.parallelism)), config.training
    if not _is_debug(config):
        return None if ranks % least_ranks(layout) else []
    given = {override.key for override in split_arguments(list(arguments))}
    overrides: dict[str, int] = {}
    for name in _LOWERED:
        key, others = f"parallelism.{name}", least_ranks(layout | {name: 1})
        if key not in given and layout[name] > 1 and ranks % others == 0:
            lowered = math.gcd(layout[name], ranks // others)
            if lowered != layout[name]:
                overrides[key] = layout[name] = lowered
    if ranks % least_ranks(layout):
        return None
    batch, local = training.global_batch_size, training.local_batch_size
    apart = ranks // least_ranks(layout | dict.fromkeys(_DATA, 1))  # ranks with rows of their own
    if batch > 0 and batch % max(1, local * apart):
        if batch % apart or _LOCAL in given:
            return None
        overrides[_LOCAL] = math.gcd(local, batch // apart)
    return [f"--{key}={value}" for key, value in overrides.items()]


def _is_debug(config: Any) -> bool:
    """Whether a configuration is one of the shipped debug files, of which the main job is one."""
    path = Path(config.job.config_file or "")
    shipped = shipped_configs().get(path.stem) if path.stem.startswith("debug_") else None
    return shipped is not None and shipped.resolve() == path.resolve()


def check_machines(
    config: Any, environment: Environment, device_type: str, data: Data = "prepare"
) -> None:
    """Check the configuration for every number of machines that the run may have.

    The launchers of several machines read no file: rank 0 does, for all (`train.checked_once`).
    """
    restarts = environment.max_restarts
    for key, value in (("enable", True), ("load_only", False), ("load_step", -1)) * bool(restarts):
        want = f"{str(value).lower()} with MAX_RESTARTS={restarts}: a restart resumes"
        got = getattr(config.checkpoint, key)
        require(got == value, f"checkpoint.{key}", got, f"{want} from the newest checkpoint")
    data = "paper" if environment.nodes > 1 else data
    check_job_config(config, environment.world_size, device_type, data)
    if environment.min_nodes is None:
        return
    text = f"{environment.min_nodes}:{environment.nodes}"
    batch, codec = config.training.global_batch_size, config.grad_compression.codec
    want = f"a number with NNODES={text}: -1 depends on the machines"
    require(batch != -1, _BATCH, -1, want)
    # Only the number of ranks that saved residuals can load them.
    want = f"none with NNODES={text}, as residuals belong to ranks"
    require(codec == "none", "grad_compression.codec", codec, want)
    for nodes in range(environment.nodes - 1, environment.min_nodes - 1, -1):
        try:
            check_job_config(config, environment.ranks * nodes, device_type, data)
        except ConfigError as error:
            want = f"only numbers of machines that fit; {nodes} of {environment.ranks} ranks: "
            raise ConfigError("NNODES", text, f"{want}{error}") from error
