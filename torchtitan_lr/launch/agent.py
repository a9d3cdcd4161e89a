# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchrun, as the launcher starts it: ``python -m torchtitan_lr.launch.agent ARGUMENTS``.

Three things differ from torchrun's own start. ``--rdzv-backend=loopback`` is a rendezvous for the
ranks of one machine that no other machine reaches: ``--standalone`` listens on all interfaces and
unpickles what it reads there. The kernel kills the ranks if this process is killed. And ranks that
do not end when one of them has failed are killed after :data:`GRACE_SECONDS`, not after half a
minute.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta

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
from torchtitan_lr.launch.processes import end_with
from torchtitan_lr.launch.report import DID_NOT_END

LOOPBACK = "127.0.0.1"

GRACE_SECONDS = 2
"""How long ranks may take to end after one of them has failed; they cannot save without it."""


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one machine: a store on a free port of the loopback interface.

    The port is bound before anybody knows its number, so two launches never meet. Ranks connect to
    this store and make none of their own, which would listen on all interfaces.

    Args:
        parameters: What torchrun read from its command line.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._timeout = timedelta(seconds=parameters.get_as_int("timeout", 900) or 900)
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the store of this process."""
        return True

    def get_backend(self) -> str:
        """The name on the command line."""
        return "loopback"

    def get_run_id(self) -> str:
        """What torchrun calls this run."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store; there is nobody to wait for."""
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        # The store takes the socket over. Left to itself it would bind to all interfaces.
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
        """Nobody closes it before its process ends."""
        return False

    def set_closed(self) -> None:
        """Nobody else would have to know."""

    def num_nodes_waiting(self) -> int:
        """There is one machine."""
        return 0

    def shutdown(self) -> bool:
        """The store ends with its process."""
        return True


def _close_soon(context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
    """Ends the ranks that are left; torchrun has no setting for how long that may take.

    In torchrun's report a rank that it killed looks like one that was killed first. So the
    launcher's log has a line for each (see `torchtitan_lr.launch.report`).
    """
    left = [h.proc for h in context.subprocess_handlers.values() if h.proc.poll() is None]
    close_ranks(context, death_sig, min(timeout, GRACE_SECONDS))
    for process in left:
        if process.poll() == -signal.SIGKILL:
            print(f"rank process {process.pid} {DID_NOT_END}", file=sys.stderr, flush=True)


def main() -> None:
    """Run torchrun with the arguments of this process; torchrun has no hooks for its ranks."""
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    bound = functools.partial(subprocess.Popen, preexec_fn=functools.partial(end_with, os.getpid()))
    with ranks_started_with(bound, _close_soon):
        torchrun()


if __name__ == "__main__":
    main()
