# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The quorum server of replicas that come and go: torchft's, with times that cannot livelock."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_lr.errors import ConfigError

JOIN_SECONDS = 60.0
"""
How long a quorum waits for a replica that is alive and has not asked for it: one that heals, saves
or validates. A shorter time than a heal takes would leave the newcomer behind forever.
"""

HEARTBEAT_SECONDS = 2.0
"""After this time without a heartbeat a replica counts as dead, and nothing waits for it."""


def check_torchft() -> None:
    """Raise a `ConfigError` if torchft, which is an extra, is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError("torchft", None, "torchft (pip install 'torchtitan_lr[ft]')")


@contextmanager
def lighthouse(
    bind: str, min_replicas: int, join_seconds: float, heartbeat_seconds: float
) -> Iterator[str]:
    """Run a quorum server.

    Args:
        bind: host:port to listen on.
        min_replicas: Smallest number of replicas of a quorum.
        join_seconds: See `JOIN_SECONDS`.
        heartbeat_seconds: See `HEARTBEAT_SECONDS`.

    Yields:
        Its address.

    Raises:
        ConfigError: torchft is not installed, or the port is taken.
    """
    check_torchft()
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=bind,
            min_replicas=min_replicas,
            join_timeout_ms=int(1000 * join_seconds),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=int(1000 * heartbeat_seconds),
        )
    except RuntimeError as error:
        raise ConfigError("--bind", bind, f"a free port of this machine ({error})") from error
    try:
        yield str(server.address())
    finally:
        server.shutdown()
