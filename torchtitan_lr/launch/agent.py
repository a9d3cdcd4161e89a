# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchrun as the launcher starts it: ``python -m torchtitan_lr.launch.agent ARGUMENTS``.

It differs from plain torchrun in five ways. ``--rdzv-backend=loopback`` is a rendezvous for the
ranks of one machine that other machines cannot reach; ``--standalone`` listens on all interfaces
and unpickles the data it receives. The kernel kills the ranks if this process is killed. When a
rank has failed, the others are killed after :data:`GRACE_SECONDS`, not after half a minute. Each
restart of the ranks is one line on the console; it follows no end to which it would come again
(a refused configuration, a loss that is not finite), whose exit status is this process's too.
Signals that a scheduler sends to all processes are left to the launcher: torchrun would fail.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
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

from torchtitan_lr.compat.elastic import (
    SubprocessContext,
    close_ranks,
    ranks_started_with,
    stop_copying,
)
from torchtitan_lr.launch.processes import RANK_STARTED, end_with
from torchtitan_lr.launch.report import DID_NOT_END
from torchtitan_lr.launch.run_state import AGAIN_THE_SAME

LOOPBACK = "127.0.0.1"

GRACE_SECONDS = 2
"""Time for the other ranks to end after one has failed; without that rank none can save."""

LEFT_TO_THE_LAUNCHER = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


def loopback_store(timeout: timedelta = timedelta(seconds=900)) -> TCPStore:
    """Open a store on a free port of the loopback interface."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # Pass a bound socket to the store: by default it binds to all interfaces.
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one machine: a store on a free port of the loopback interface.

    The port is bound before its number is published, so two launches cannot share it. Ranks connect
    to this store; a store of their own would listen on all interfaces.
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
        self._store = loopback_store(self._timeout)
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
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


class Ranks:
    """Starts and ends the ranks of this machine, and reports why they start again.

    Attributes:
        cause: Why they were last ended, for the line of the next start.
    """

    def __init__(self) -> None:
        self.cause = ""
        self._parent = os.getpid()
        self._first = 0  # the first rank of this machine

    def popen(self, *args: Any, env: Mapping[str, str], **keys: Any) -> subprocess.Popen[bytes]:
        """Start a rank that the kernel kills if this process ends; arguments as for Popen."""
        done = int(env["TORCHELASTIC_RESTART_COUNT"])
        most = int(env["TORCHELASTIC_MAX_RESTARTS"])
        self._first = int(env["RANK"]) - int(env["LOCAL_RANK"])
        if self.cause and env["LOCAL_RANK"] == "0":
            machines, world = int(env["GROUP_WORLD_SIZE"]), int(env["WORLD_SIZE"])
            size = f"{machines} machine{'s'[: machines > 1]}, {world} rank{'s'[: world > 1]}"
            _say(f"restart ({done} of {most} after failures): {self.cause}; {size}")
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
        process = start(*args, env=env, preexec_fn=self._prepare, **keys)
        # The launcher sends signals to the ranks; it would search all processes for them.
        _say(
            f"process {process.pid} {RANK_STARTED} {env['RANK']} (local_rank: {env['LOCAL_RANK']})"
        )
        return process

    def _prepare(self) -> None:
        """Prepare a rank, between fork and exec."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_LAUNCHER)
        end_with(self._parent)

    def close(
        self, context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30
    ) -> None:
        """End the remaining ranks; arguments as torchrun gives them.

        After a failure they have `GRACE_SECONDS`; torchrun has no setting for this time. Without a
        failure the number of machines changes: they have torchrun's time to save, and SIGUSR2 tells
        them that they will start again.

        torchrun's report does not distinguish ranks that it killed from ranks that were killed by
        others. Therefore this prints a line for each into the launcher's log (see
        `torchtitan_lr.launch.report`).

        Raises:
            SystemExit: A rank has ended as it would again; torchrun would restart it, and has one
                exit status for all failures.
        """
        processes = {rank: h.proc for rank, h in context.subprocess_handlers.items()}
        codes = {rank: process.poll() for rank, process in processes.items()}
        left = [processes[rank] for rank, code in codes.items() if code is None]
        failed = {rank: code for rank, code in codes.items() if code}
        self.cause = why_ended({self._first + rank: code for rank, code in failed.items()})
        if processes and len(left) == len(processes):
            close_ranks(context, signal.SIGUSR2, timeout)
        else:
            close_ranks(context, death_sig, min(timeout, GRACE_SECONDS))
        for process in left:
            if process.poll() == -signal.SIGKILL:
                _say(f"rank process {process.pid} {DID_NOT_END}")
        if final := [code for code in AGAIN_THE_SAME if code in failed.values()]:
            stop_copying(context)
            raise SystemExit(final[0])


def why_ended(codes: Mapping[int, int]) -> str:
    """Describe why the ranks of this machine are ended.

    Args:
        codes: Exit status of each rank that failed on this machine; negative for a signal.
    """
    if not codes:
        return "the machines of the run changed"
    # A rank that a signal ended makes the others fail.
    rank = min(codes, key=lambda rank: (codes[rank] > 0, rank))
    code = codes[rank]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with status {code}"
    return f"rank {rank} {how}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run torchrun with this process's arguments and patched start and end of the ranks."""
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    # Blocked, not ignored: ranks would inherit that, and torchrun sets handlers of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_LAUNCHER)
    ranks = Ranks()
    with ranks_started_with(ranks.popen, lambda *values, **keys: ranks.close(*values, **keys)):
        torchrun()


if __name__ == "__main__":
    main()
