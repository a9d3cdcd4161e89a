# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The environment variables of a launch."""

import os
import sys
from dataclasses import dataclass

from torchtitan_lr.errors import ConfigError

DEFAULT_RANKS = 4

# Limits of NGPU; a dry run starts only one process.
MAX_RANKS = 1024
MAX_DRY_RANKS = 1_000_000
MAX_NODES = 100_000


@dataclass(frozen=True)
class Environment:
    """The environment variables of a launch, checked.

    Args:
        ranks: Ranks on this machine.
        nodes: Number of machines.
        log_ranks: Local ranks whose output is shown on the console, e.g. ``0,1``.
        comm_mode: torchtitan's ``comm.mode``, empty for a real run.
        train_module: The module that every rank runs.
        ranks_given: Whether the user set ``NGPU``.
    """

    ranks: int
    nodes: int
    log_ranks: str
    comm_mode: str
    train_module: str
    ranks_given: bool = True

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.ranks * self.nodes


def read_environment() -> Environment:
    """Read and check torchtitan's environment variables.

    Raises:
        ConfigError: A variable has an invalid value.
    """
    comm_mode = os.environ.get("COMM_MODE", "")
    if comm_mode not in ("", "default", "fake_backend"):
        raise ConfigError("COMM_MODE", comm_mode, "'fake_backend', or leave it out")
    limit = MAX_DRY_RANKS if comm_mode == "fake_backend" else MAX_RANKS
    ranks = _positive_variable("NGPU", DEFAULT_RANKS, limit)
    nodes = _positive_variable("NNODES", 1, MAX_NODES)
    log_ranks = check_log_ranks(os.environ.get("LOG_RANK") or "0", ranks)
    if nodes > 1 and not os.environ.get("RDZV_ENDPOINT"):
        raise ConfigError("RDZV_ENDPOINT", "", f"host:port of one of the {nodes} machines")
    return Environment(
        ranks=ranks,
        nodes=nodes,
        log_ranks=log_ranks,
        comm_mode="" if comm_mode == "default" else comm_mode,
        train_module=os.environ.get("TRAIN_FILE") or "torchtitan_lr.train",
        ranks_given=bool(os.environ.get("NGPU")),
    )


def check_log_ranks(text: str, ranks: int) -> str:
    """Return the ranks of ``LOG_RANK``, e.g. ``0,1``.

    Args:
        text: The variable's value.
        ranks: Ranks on this machine.

    Raises:
        ConfigError: A rank is none of this machine's.
    """
    shown = [rank.strip() for rank in text.split(",")]
    if not all(rank.isdecimal() and len(rank) < 9 and int(rank) < ranks for rank in shown):
        raise ConfigError("LOG_RANK", text, f"ranks from 0 to {ranks - 1} such as 0,1")
    return ",".join(str(int(rank)) for rank in shown)


def _positive_variable(name: str, default: int, limit: int) -> int:
    text = os.environ.get(name) or str(default)
    # Check the length first: int() raises for very long strings of digits.
    if not text.isdecimal() or (len(text) < 99 and int(text) == 0):
        raise ConfigError(name, text, "a positive integer such as 4")
    if len(text) >= 99 or int(text) > limit:
        got = text if len(text) < 20 else f"{text[:16]}..."
        raise ConfigError(name, got, f"at most {limit:,}")
    return int(text)


def loopback_variables() -> dict[str, str]:
    """Return the variables that restrict the ranks of one machine to its loopback interface.

    Ranks unpickle data received over gloo, so other machines must not reach these sockets. NCCL
    uses no sockets between the GPUs of one machine, so ``NCCL_SOCKET_IFNAME`` is not set.
    """
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def launched_ranks(comm_mode: str) -> int:
    """Return the number of ranks that torchrun or the launcher started.

    Args:
        comm_mode: ``comm.mode``; a dry run is one process without torchrun.

    Raises:
        ConfigError: A variable is missing: this process was not started as a rank.
    """
    numbers, words = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"], ["MASTER_ADDR"]
    if comm_mode == "fake_backend":
        numbers, words = ["NGPU"], []
    for name in numbers + words:
        value = os.environ.get(name, "")
        if not value or (name in numbers and not value.isdecimal()):
            want = "what torchrun sets: start with torchrun or python -m torchtitan_lr.launch"
            raise ConfigError(name, os.environ.get(name), want)
    return int(os.environ[numbers[0]])
