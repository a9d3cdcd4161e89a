# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The TOML section ``[fault_tolerance]``: replicas that come and go.

As in :mod:`torchtitan_lr.config.schema`, no ``from __future__ import annotations``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPLICAS = "replica_*"
"""Pattern of the folders that `private_folder` returns for replicas."""


@dataclass
class FaultTolerance:
    """Additions to torchtitan's ``[fault_tolerance]`` (experimental; docs/run_and_recover.md)."""

    group_size: int = 0
    """
    Largest number of replicas. The training data are split into as many parts, and
    ``training.global_batch_size`` counts the rows of as many replicas.
    """

    lighthouse: str = "127.0.0.1:29510"
    """host:port of the quorum server, torchft's ``torchft_lighthouse``."""

    address: str = "127.0.0.1"
    """Address of this machine under which the other replicas reach it: loopback or private."""

    allow_public_addresses: bool = False
    """
    Accept addresses that are neither loopback nor private. The ports have no authentication: who
    reaches them can read the weights and stop the run.
    """

    quorum_timeout_s: int = 600
    """
    Seconds that a replica waits for ``min_replica_size`` replicas before it ends with an error.
    """

    heal_timeout_s: int = 300
    """Seconds in which a newcomer must have fetched weights and optimizer state."""

    quorum_retries: int = 600
    """How often a request to the quorum server is repeated, so that it can be restarted."""

    digests: bool = False
    """Write a digest of weights and optimizer state into commits.jsonl after every step."""


def private_folder(config: Any) -> Path:
    """Return the folder of a run's log files, lock and state.

    It is ``job.dump_folder``, and for one of several replicas a folder in it: checkpoints and
    metrics are common to all replicas, these are not.
    """
    folder = Path(config.job.dump_folder)
    replicas = config.fault_tolerance
    return folder / f"replica_{replicas.replica_id}" if replicas.enable else folder


def replica_rows(config: Any, ranks: int, rank: int) -> tuple[int, int]:
    """Return by how many ranks the training data are split, and which of them this rank is.

    Args:
        config: The run's configuration.
        ranks: Data-parallel ranks of this replica, or of the run without replicas that come and go.
        rank: This one.
    """
    replicas = getattr(config, "fault_tolerance", None)
    if replicas is None or not replicas.enable:
        return ranks, rank
    return replicas.group_size * ranks, replicas.replica_id * ranks + rank
