# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The quorum server of replicas that come and go: torchft's, an extra."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lighthouse(
    bind: str, min_replicas: int, join_seconds: float, heartbeat_seconds: float
) -> Iterator[str]:
    """Run a quorum server.

    Args:
        bind: host:port to listen on.
        min_replicas: Smallest number of replicas of a quorum.
        join_seconds: How long a quorum waits for a replica that is alive and has not asked for it:
            one that heals, saves or validates. A shorter time than a heal takes would leave the
            newcomer behind forever.
        heartbeat_seconds: After this time without a heartbeat a replica counts as dead, and nothing
            waits for it.

    Yields:
        Its address.
    """
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=int(1000 * join_seconds),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * heartbeat_seconds),
    )
    try:
        yield str(server.address())
    finally:
        server.shutdown()
