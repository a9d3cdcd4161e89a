# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas that come and go as an extension of a run: sections, folder, checks and trainer.

A TOML names this module by ``job.custom_config_module``; `torchtitan_lr.config.build.extension_of`
says what the package calls. It is imported without torch.

As in :mod:`torchtitan_lr.config.schema`, no ``from __future__ import annotations``.
"""

import importlib.util
import os
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path
from typing import Annotated, Any

from torchtitan_lr.checkpoints.layout import RUN_CONFIG
from torchtitan_lr.config import schema
from torchtitan_lr.config.ranges import POSITIVE
from torchtitan_lr.config.schema import TSR
from torchtitan_lr.errors import require


def _is_private(text: str) -> bool:
    """Return whether a text is a literal IPv4 address, loopback or private, of one interface."""
    try:
        address = IPv4Address(text)
    except AddressValueError:
        return False
    return not address.is_unspecified and (address.is_loopback or address.is_private)


_NEEDED: dict[str, tuple[Any, str]] = {
    "optimizer.name": (TSR, "no other optimizer reduces by itself"),
    "grad_compression.codec": ("none", "TSR-Adam sums cores"),
    "fault_tolerance.semi_sync_method": (None, "synchronous quorum"),
    "fault_tolerance.process_group": ("gloo", "NCCL is untested"),
    # A degree of 0 or -1 is refused or resolved by the package's own checks.
    "parallelism.data_parallel_replicate_degree": (1, "a replica is one"),
    "parallelism.pipeline_parallel_degree": (1, "pipelines are untested"),
    "comm.mode": ("default", "a dry run has no quorum"),
    "checkpoint.create_seed_checkpoint": (False, "make it with --fault_tolerance.no_enable"),
}
"""What `check` wants of other keys, of numbers at most this, and why."""


@dataclass
class FaultTolerance:
    """Additions to torchtitan's ``[fault_tolerance]`` (experimental; docs/run_and_recover.md)."""

    group_size: int = 0
    """Largest number of replicas. The training data are split into as many parts, and
    ``training.global_batch_size`` counts the rows of as many replicas."""

    lighthouse: str = "127.0.0.1:29510"
    """host:port of the quorum server, torchft's ``torchft_lighthouse``."""

    address: str = "127.0.0.1"
    """Address of this machine under which the other replicas reach it: loopback or private. Its
    ports have no authentication: who reaches them can read the weights and stop the run."""

    quorum_timeout_s: Annotated[int, POSITIVE] = 600
    """Seconds that a replica waits for ``min_replica_size`` replicas before it ends with an
    error."""

    heal_timeout_s: Annotated[int, POSITIVE] = 300
    """Seconds in which a newcomer must have fetched weights and optimizer state."""

    digests: bool = False
    """Write a digest of weights and optimizer state into commits.jsonl after every step."""


@dataclass
class JobConfig(schema.JobConfig):
    """The package's sections and this experiment's."""

    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)


def complete(config: Any) -> None:
    """Give a replica its own dump folder in ``job.dump_folder``.

    Log files, metrics, lock and state are a replica's own. Checkpoints and the run's record are
    common to all replicas, in the folder that the configuration names.
    """
    folder, own = Path(config.job.dump_folder), f"replica_{config.fault_tolerance.replica_id}"
    if not config.fault_tolerance.enable or folder.name == own:  # the record of a replica
        return
    config.job.dump_folder = os.path.join(config.job.dump_folder, own)
    config.job.save_config_file = f"../{config.job.save_config_file or RUN_CONFIG}"
    config.checkpoint.folder = str((folder / config.checkpoint.folder).absolute())


def trainer_class(config: Any) -> Any:
    """Return the trainer of a rank."""
    # Imported late: it needs torch.
    from torchtitan_lr.experiments.replicas.trainer import ReplicaTrainer
    from torchtitan_lr.training.trainer import Trainer

    return ReplicaTrainer if config.fault_tolerance.enable else Trainer


def check(config: Any, world_size: int, device_type: str) -> None:
    """Raise a ConfigError for the first key with which replicas cannot come and go."""
    section, on = config.fault_tolerance, "with fault_tolerance.enable"
    if not section.enable:
        return
    for key, (most, why) in _NEEDED.items():
        table, _, name = key.partition(".")
        got = getattr(getattr(config, table), name)
        fits = got <= most if isinstance(most, int) else got == most
        require(fits, key, got, f"{most!r} {on}: {why}")
    nodes = os.environ.get("NNODES", "1")
    require(nodes == "1", "NNODES", nodes, f"1 {on}: a replica is one machine, started by itself")
    want = f"false on {device_type}: only CPU replicas were tested"
    require(device_type == "cpu", "fault_tolerance.enable", True, want)
    want = "a loopback or private IPv4 address, not all interfaces: the ports are not protected"
    require(_is_private(section.address), "fault_tolerance.address", section.address, want)
    host, _, port = section.lighthouse.rpartition(":")
    fits = _is_private(host) and port.isdecimal() and 0 < int(port) < 2**16
    want = f"host:port such as 127.0.0.1:29510, of {want}"
    require(fits, "fault_tolerance.lighthouse", section.lighthouse, want)
    size, least, number = section.group_size, section.min_replica_size, section.replica_id
    want = "the largest number of replicas, such as 3"
    require(size >= 1, "fault_tolerance.group_size", size, want)
    want = f"a number from 0 to {size - 1}, another for every replica"
    require(0 <= number < size, "fault_tolerance.replica_id", number, want)
    majority = size // 2 + 1
    want = f"{majority} to {size}, a majority: else two halves of a cut network would train on"
    require(majority <= least <= size, "fault_tolerance.min_replica_size", least, want)
    key, got = "fault_tolerance.process_group_timeout_ms", section.process_group_timeout_ms
    require(got >= 1, key, got, POSITIVE.want)
    ranks = max(1, world_size // max(1, config.parallelism.tensor_parallel_degree))
    unit = config.training.local_batch_size * size * ranks
    batch = config.training.global_batch_size
    each = "" if ranks == 1 else f" x {ranks} data-parallel ranks of a replica"
    want = f"a multiple of {unit} (local_batch_size x fault_tolerance.group_size{each}), or -1"
    require(batch == -1 or batch % unit == 0, "training.global_batch_size", batch, want)
    want = "false, or torchft (pip install 'torchtitan_lr[ft]')"
    require(importlib.util.find_spec("torchft"), "fault_tolerance.enable", True, want)
