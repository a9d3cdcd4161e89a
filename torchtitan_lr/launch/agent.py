# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchrun as the launcher starts it: ``python -m torchtitan_lr.launch.agent ARGUMENTS``.

It differs from plain torchrun in three ways. ``--rdzv-backend=loopback`` is a rendezvous for the
ranks of one machine that other machines cannot reach; ``--standalone`` listens on all interfaces
and unpickles the data it receives. The kernel kills the ranks if this process is killed. When a
rank has failed, the others are killed after :data:`GRACE_SECONDS`, not after half a minute.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from torchtitan_lr.compat.elastic import SubprocessContext, close_ranks, ranks_started_with
from torchtitan_lr.console.terminal import ColoredStream, wants_color
from torchtitan_lr.launch.processes import end_with
from torchtitan_lr.launch.report import DID_NOT_END

LOOPBACK = "127.0.0.1"

GRACE_SECONDS = 2
"""Time for the other ranks to end after one has failed; they cannot save without it anyway."""


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one machine: a store on a free port of the loopback interface.

    The port is bound before its number is published, so two launches cannot share it. Ranks connect
    to this store; a store of their own would listen on all interfaces.

    Args:
        parameters: torchrun's parsed rendezvous options.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._timeout = timedelta(seconds=parameters.get_as_int("timeout", 900) or 900)
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use this process's store."""
        return True

    def get_backend(self) -> str:
        """Return the backend's name on the command line."""
        return "loopback"

    def get_run_id(self) -> str:
        """Return torchrun's id of this run."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store and return at once: there are no other machines."""
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # Pass a bound socket to the store: by default it binds to all interfaces.
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        where = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Return False: it closes with its process."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other machines to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0: there is one machine."""
        return 0

    def shutdown(self) -> bool:
        """Return True: the store closes with its process."""
        return True


def _close_soon(context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
    """End the remaining ranks within `GRACE_SECONDS`; torchrun has no setting for this time.

    torchrun's report does not distinguish ranks that it killed from ranks that were killed by
    others. Therefore this prints a line for each into the launcher's log (see
    `torchtitan_lr.launch.report`).
    """
    left = [h.proc for h in context.subprocess_handlers.values() if h.proc.poll() is None]
    close_ranks(context, death_sig, min(timeout, GRACE_SECONDS))
    for process in left:
        if process.poll() == -signal.SIGKILL:
            print(f"rank process {process.pid} {DID_NOT_END}", file=sys.stderr, flush=True)


def main() -> None:
    """Run torchrun with this process's arguments and patched start and end of the ranks."""
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    output: Any = ColoredStream(sys.stdout) if wants_color(sys.stdout) else sys.stdout
    bound = functools.partial(subprocess.Popen, preexec_fn=functools.partial(end_with, os.getpid()))
    # torchrun copies the ranks' lines to `sys.stdout`.
    with redirect_stdout(output), ranks_started_with(bound, _close_soon):
        torchrun()


if __name__ == "__main__":
    main()
