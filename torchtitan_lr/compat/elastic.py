# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torchrun: how it starts and ends its ranks, and the store by which they meet.

torchrun has neither a hook before a rank starts nor a time limit for the other ranks to end after
one has failed. Ranks of several machines meet at one store in all starts: after a restart they
would read keys of an earlier start, at the address of a machine that may be gone. Torch's own way
out, ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``, picks a port and closes it again; rank 0 binds it
seconds later, when another process may have it.

Tested with torch 2.11, 2.13 and 2.15.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.multiprocessing.api import SubprocessContext as SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

Close = Callable[..., None]
"""Ends the ranks of a context: ``close(context, death_sig, timeout=30)``, as torchrun calls it."""

close_ranks: Close = SubprocessContext._close
"""torchrun's own function; it waits up to 30 s."""


_meet = DynamicRendezvousHandler.next_rendezvous


def _meet_at_a_new_store(handler: DynamicRendezvousHandler) -> RendezvousInfo:
    """Open a store for the next start of the ranks, on a port that stays bound from now on."""
    handler._bootstrap_store_info = handler._shared_tcp_store_server = None
    return _meet(handler)


def stop_copying(context: SubprocessContext) -> None:
    """End the threads that copy the ranks' output, which torchrun does after ``close`` returns."""
    # The interpreter waits for them, so an exception out of ``close`` must come after this.
    for log in context._tail_logs:
        log.stop()


@contextmanager
def ranks_started_with(popen: Callable[..., Any], close: Close) -> Iterator[None]:
    """Make torchrun start its ranks with ``popen``, each time with a new store, and end them.

    Replaces ``Popen`` in torchrun's module of subprocesses, ``SubprocessContext._close`` by
    ``close``, and ``DynamicRendezvousHandler.next_rendezvous``.
    """
    # If upstream starts ranks differently, they outlive a killed launcher; a test detects this.
    with (
        patch.object(subprocess_handler, "Popen", popen),
        patch.object(SubprocessContext, "_close", close),
        patch.object(DynamicRendezvousHandler, "next_rendezvous", _meet_at_a_new_store),
    ):
        yield
