# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torchrun: how it starts and ends its ranks.

torchrun has neither a hook before a rank starts nor a time limit for the other ranks to end after
one has failed.

Tested with torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.multiprocessing.api import SubprocessContext as SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

Close = Callable[..., None]
"""Ends the ranks of a context: ``close(context, death_sig, timeout=30)``, as torchrun calls it."""

close_ranks: Close = SubprocessContext._close
"""torchrun's own function; it waits up to 30 s."""


def stop_copying(context: SubprocessContext) -> None:
    """End the threads that copy the ranks' output, which torchrun does after ``close`` returns."""
    # The interpreter waits for them, so an exception out of ``close`` must come after this.
    for log in context._tail_logs:
        log.stop()


@contextmanager
def ranks_started_with(popen: Callable[..., Any], close: Close) -> Iterator[None]:
    """Make torchrun start its ranks with ``popen`` and end them with ``close``.

    Replaces ``Popen`` in torchrun's module of subprocesses, and ``SubprocessContext._close``.
    """
    # If upstream starts ranks differently, they outlive a killed launcher; a test detects this.
    with (
        patch.object(subprocess_handler, "Popen", popen),
        patch.object(SubprocessContext, "_close", close),
    ):
        yield
