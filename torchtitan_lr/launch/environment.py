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
MAX_MAX_RESTARTS = 1000

_RDZV_SETTINGS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "is_host"),
)
"""Keys of ``RDZV_CONF``: seconds, a number of attempts, and 0 or 1."""


@dataclass(frozen=True)
class Environment:
    """The environment variables of a launch, checked.

    Args:
        ranks: Ranks on this machine.
        nodes: Number of machines; the largest, if a range was given.
        log_ranks: Ranks whose output is shown, by their number in the run, e.g. ``0,1``.
        comm_mode: torchtitan's ``comm.mode``, empty for a real run.
        train_module: The module that every rank runs.
        ranks_given: Whether the user set ``NGPU``.
        min_nodes: The smallest number of machines of a range such as ``2:4``, else None.
        max_restarts: How often the ranks of a machine are started again after a failure.
        rdzv_settings: torchrun's settings of the rendezvous, from ``RDZV_CONF``.
        endpoint: Where several machines meet, ``host:port``; empty for one machine.
    """

    ranks: int
    nodes: int
    log_ranks: str
    comm_mode: str
    train_module: str
    ranks_given: bool = True
    min_nodes: int | None = None
    max_restarts: int = 0
    rdzv_settings: tuple[tuple[str, str], ...] = ()
    endpoint: str = ""

    @property
    def world_size(self) -> int:
        """Ranks of the whole run, with all its machines."""
        return self.ranks * self.nodes

    @property
    def nodes_text(self) -> str:
        """The number of machines or their range, as in ``NNODES``."""
        return str(self.nodes) if self.min_nodes is None else f"{self.min_nodes}:{self.nodes}"


def read_environment() -> Environment:
    """Read and check torchtitan's environment variables.

    Raises:
        ConfigError: A variable has an invalid value.
    """
    comm_mode = os.environ.get("COMM_MODE", "")
    if comm_mode not in ("", "default", "fake_backend"):
        raise ConfigError("COMM_MODE", comm_mode, "'fake_backend', or leave it out")
    limit = MAX_DRY_RANKS if comm_mode == "fake_backend" else MAX_RANKS
    ranks = _positive("NGPU", os.environ.get("NGPU") or str(DEFAULT_RANKS), limit)
    restarts = os.environ.get("MAX_RESTARTS") or "0"
    if restarts != "0":
        _positive("MAX_RESTARTS", restarts, MAX_MAX_RESTARTS)
    first, colon, last = (os.environ.get("NNODES") or "1").partition(":")
    least = _positive("NNODES", first, MAX_NODES)
    nodes = _positive("NNODES", last, MAX_NODES) if colon else least
    if least > nodes:
        raise ConfigError("NNODES", f"{first}:{last}", f"a range such as {nodes}:{least}")
    endpoint = (os.environ.get("RDZV_ENDPOINT") or "").strip() if nodes > 1 else ""
    if nodes > 1 and (not endpoint or "," in endpoint):
        raise ConfigError("RDZV_ENDPOINT", endpoint, f"host:port of one of the {nodes} machines")
    conf = os.environ.get("RDZV_CONF") or ""
    settings = [part.partition("=")[::2] for part in conf.split(",") if part]
    for key, value in settings:
        if key not in _RDZV_SETTINGS or not value.isdecimal() or len(value) > 9:
            want = f"KEY=NUMBER,... with the keys {', '.join(_RDZV_SETTINGS)}"
            raise ConfigError("RDZV_CONF", conf, want)
    log_ranks = check_log_ranks(os.environ.get("LOG_RANK") or "0", ranks * nodes)
    return Environment(
        ranks=ranks,
        nodes=nodes,
        log_ranks=log_ranks,
        comm_mode="" if comm_mode == "default" else comm_mode,
        train_module=os.environ.get("TRAIN_FILE") or "torchtitan_lr.train",
        ranks_given=bool(os.environ.get("NGPU")),
        min_nodes=None if least == nodes else least,
        max_restarts=int(restarts),
        rdzv_settings=tuple(settings),
        endpoint=endpoint,
    )


def check_log_ranks(text: str, ranks: int) -> str:
    """Return the ranks of ``LOG_RANK``, e.g. ``0,1``.

    Raises:
        ConfigError: A rank is none of the run's.
    """
    shown = [rank.strip() for rank in text.split(",")]
    if not all(rank.isdecimal() and len(rank) < 9 and int(rank) < ranks for rank in shown):
        raise ConfigError("LOG_RANK", text, f"ranks from 0 to {ranks - 1} such as 0,1")
    return ",".join(str(int(rank)) for rank in shown)


def _positive(name: str, text: str, limit: int) -> int:
    # Check the length first: int() raises for very long strings of digits.
    if not text.isdecimal() or (len(text) < 99 and int(text) == 0):
        raise ConfigError(name, text, "a positive integer such as 4")
    if len(text) >= 99 or int(text) > limit:
        got = text if len(text) < 20 else f"{text[:16]}..."
        raise ConfigError(name, got, f"at most {limit:,}")
    return int(text)


def loopback_variables() -> dict[str, str]:
    """Return the variables that restrict the ranks of one machine to its loopback interface.

    Ranks unpickle what gloo receives, so other machines must not reach its sockets. NCCL uses none
    between the GPUs of one machine.
    """
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def forget_other_ranks() -> None:
    """Drop rank 0 of 1 from the environment, and refuse ranks that no launcher has started whole.

    A cluster's pod and a shell may have ``RANK`` and ``WORLD_SIZE``, and nothing started this
    command as a rank: it would wait for the others.

    Raises:
        ConfigError: The variables are not those of torchrun.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if (os.environ.get("WORLD_SIZE") or "1", os.environ.get("RANK") or "0") == ("1", "0"):
        os.environ.pop("WORLD_SIZE", None)
        os.environ.pop("RANK", None)
        return
    try:
        launched_ranks("")
    except ConfigError as error:
        want = "what torchrun sets: start with torchrun, or unset RANK and WORLD_SIZE"
        raise ConfigError(error.key, error.got, want) from error


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
            want = "what torchrun sets: start with torchrun or torchtitan-lr train"
            raise ConfigError(name, os.environ.get(name), want)
    return int(os.environ[numbers[0]])
