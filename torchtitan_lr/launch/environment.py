# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The environment variables of a launch."""

import os
from dataclasses import dataclass

from torchtitan_lr.errors import require

DEFAULT_RANKS = 4


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


def launched_ranks(comm_mode: str) -> int:
    """Return the number of ranks that torchrun or the launcher started, or a dry run pretends."""
    name = "NGPU" if comm_mode == "fake_backend" else "WORLD_SIZE"
    want = "what torchrun sets: start with torchrun or torchtitan-lr train"
    require(os.environ.get(name), name, os.environ.get(name, ""), want)
    return int(os.environ[name])
