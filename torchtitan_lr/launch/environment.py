# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The environment variables of a launch."""

import os
from dataclasses import dataclass

from torchtitan_lr.errors import ConfigError

DEFAULT_RANKS = 4

_RDZV_SETTINGS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "is_host"),
)
"""Keys of ``RDZV_CONF``: seconds, a number of attempts, and 0 or 1."""


@dataclass(frozen=True)
class Environment:
    """The environment variables of a launch, checked."""

    ranks: int  # on this machine
    nodes: int  # machines; the most, if a range was given
    log_ranks: str  # whose output is shown, by their number in the run, e.g. ``0,1``
    comm_mode: str  # torchtitan's ``comm.mode``, empty for a real run
    train_module: str  # that every rank runs; without `begin_rank` it outlives a killed launcher
    ranks_given: bool = True  # whether the user set ``NGPU``
    min_nodes: int | None = None  # of a range such as ``2:4``, else None
    max_restarts: int = 0  # how often failed ranks of a machine are started again
    rdzv_settings: tuple[tuple[str, str], ...] = ()  # torchrun's, from ``RDZV_CONF``
    endpoint: str = ""  # where several machines meet, ``host:port``

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
    most = 1_000_000 if comm_mode == "fake_backend" else 1024
    ranks = _number("NGPU", os.environ.get("NGPU") or str(DEFAULT_RANKS), most)
    restarts = _number("MAX_RESTARTS", os.environ.get("MAX_RESTARTS") or "0", 1000, least=0)
    first, _, last = (os.environ.get("NNODES") or "1").partition(":")
    least, nodes = (_number("NNODES", text, 100_000) for text in (first, last or first))
    if least > nodes:
        raise ConfigError("NNODES", f"{first}:{last}", f"a range such as {nodes}:{least}")
    if comm_mode == "fake_backend":  # one process pretends to be a rank of them all
        ranks, least, nodes, restarts = ranks * nodes, 1, 1, 0
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
        max_restarts=restarts,
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


def _number(name: str, text: str, most: int, least: int = 1) -> int:
    if not (text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise ConfigError(name, text, f"a number from {least} to {most:,}")
    return int(text)


def launched_ranks(comm_mode: str) -> int:
    """Return the number of ranks that torchrun or the launcher started, or a dry run pretends.

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
