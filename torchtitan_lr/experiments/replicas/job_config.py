# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas that come and go as an extension of a run: sections, folder, checks and trainer.

A TOML names this module by ``job.custom_config_module``; `torchtitan_lr.config.build.extension_of`
says what the package calls. It is imported without torch.

As in :mod:`torchtitan_lr.config.schema`, no ``from __future__ import annotations``.
"""

import importlib.util
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.layout import RUN_CONFIG
from torchtitan_lr.config import schema
from torchtitan_lr.config.schema import TSR
from torchtitan_lr.errors import ConfigError, require


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

    quorum_timeout_s: int = 600
    """Seconds that a replica waits for ``min_replica_size`` replicas before it ends with an
    error."""

    heal_timeout_s: int = 300
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
    section = config.fault_tolerance
    if not section.enable:
        return
    parallelism, comm = config.parallelism, config.comm
    nodes, on = os.environ.get("NNODES", "1"), "with fault_tolerance.enable"
    replicate, stages = "data_parallel_replicate_degree", "pipeline_parallel_degree"
    needed: tuple[tuple[str, Any, Any, str], ...] = (
        ("optimizer.name", config.optimizer.name, TSR, "no other optimizer reduces by itself"),
        ("grad_compression.codec", config.grad_compression.codec, "none", "TSR-Adam sums cores"),
        ("fault_tolerance.semi_sync_method", section.semi_sync_method, None, "synchronous quorum"),
        ("fault_tolerance.process_group", section.process_group, "gloo", "NCCL is untested"),
        ("NNODES", nodes, "1", "a replica is one machine, which starts by itself"),
        (f"parallelism.{replicate}", getattr(parallelism, replicate), 1, "a replica is one"),
        (f"parallelism.{stages}", getattr(parallelism, stages), 1, "pipelines are untested"),
        ("comm.mode", comm.mode, "default", "a dry run has no quorum"),
    )
    for key, got, want, why in needed:
        # A degree of 0 or -1 is refused or resolved by the package's own checks.
        if (got > want) if isinstance(want, int) else (got != want):
            shown = want if isinstance(want, int) or key == "NNODES" else repr(want)
            raise ConfigError(key, got, f"{shown} {on}: {why}")
    want = f"false {on}: make it with --fault_tolerance.no_enable"
    seed = config.checkpoint.create_seed_checkpoint
    require(not seed, "checkpoint.create_seed_checkpoint", True, want)
    want = f"false on {device_type}: only CPU replicas were tested"
    require(device_type == "cpu", "fault_tolerance.enable", True, want)
    _check_numbers(config, world_size)
    _check_address(section.address, "fault_tolerance.address")
    host, colon, port = section.lighthouse.rpartition(":")
    fits, key = colon and port.isdecimal() and 0 < int(port) < 2**16, "fault_tolerance.lighthouse"
    require(fits, key, section.lighthouse, "host:port such as 127.0.0.1:29510")
    _check_address(host, key)
    want = "false, or torchft (pip install 'torchtitan_lr[ft]')"
    require(importlib.util.find_spec("torchft"), "fault_tolerance.enable", True, want)


def _check_numbers(config: Any, world_size: int) -> None:
    """Check the number of replicas, their times, and the rows of a step."""
    section = config.fault_tolerance
    size, least, number = section.group_size, section.min_replica_size, section.replica_id
    want = "the largest number of replicas, such as 3"
    require(size >= 1, "fault_tolerance.group_size", size, want)
    want = f"a number from 0 to {size - 1}, another for every replica"
    require(0 <= number < size, "fault_tolerance.replica_id", number, want)
    majority = size // 2 + 1
    want = (
        f"{majority} to {size}, a majority of group_size: with fewer, two halves of a cut "
        "network would train on"
    )
    require(majority <= least <= size, "fault_tolerance.min_replica_size", least, want)
    for name in ("process_group_timeout_ms", "quorum_timeout_s", "heal_timeout_s"):
        got = getattr(section, name)
        require(got >= 1, f"fault_tolerance.{name}", got, "a positive integer")
    ranks = max(1, world_size // max(1, config.parallelism.tensor_parallel_degree))
    unit = config.training.local_batch_size * size * ranks
    batch = config.training.global_batch_size
    each = "" if ranks == 1 else f" x {ranks} data-parallel ranks of a replica"
    want = f"a multiple of {unit} (local_batch_size x fault_tolerance.group_size{each}), or -1"
    require(batch == -1 or batch % unit == 0, "training.global_batch_size", batch, want)


def _check_address(text: str, key: str) -> None:
    """Raise for an address that is not a literal IPv4 address, loopback or private."""
    want = "a loopback or private IPv4 address of this machine such as 127.0.0.1 or 10.0.0.7"
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise ConfigError(key, text, want) from None
    require(not address.is_unspecified, key, text, f"{want}, not all interfaces")
    private = address.is_loopback or address.is_private
    require(private, key, text, f"{want}: the ports are not protected")
