# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchrun's agent, which starts, watches and restarts the ranks of one machine.

It runs in the launcher's own process and differs from torchrun in what torchrun has no setting for.
Tested with torch 2.11, 2.13 and 2.15.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

GRACE_SECONDS = 2
"""Time for the other ranks to end after one has failed; without that rank none can save."""


@dataclass(frozen=True)
class Failure:
    """The end of the rank whose end made the others end."""

    rank: int | None  # by its number in the run; None if none could start
    status: int | None  # negative for a signal; None likewise
    error: str  # what it reported
    output: Path  # the folder of its output
    stuck: Sequence[int] = ()  # ranks that did not end on SIGTERM

    def __str__(self) -> str:
        """Say in one line which rank failed, and how."""
        if self.status is None:
            return self.error
        if self.status < 0 and not self.error:
            return f"rank {self.rank} was ended by {signal.Signals(-self.status).name}"
        what = f": {self.error}" if self.error else f" with status {self.status}"
        for rank in self.stuck:
            what += f"; rank {rank} did not end on SIGTERM: stopped, or stuck"
        return f"rank {self.rank} failed{what}"


class Agent(LocalElasticAgent):
    """torchrun's agent, which does not restart what would end in the same way.

    When a rank has failed, the others get SIGTERM, and SIGKILL `GRACE_SECONDS` later. When the
    number of machines changes, SIGUSR2 tells the ranks that they will start again, in one line.
    """

    failure: Failure | None = None  # the last one
    meeting = True  # whether it waits for other machines, or starts ranks
    restarts = True  # whether failed ranks may start again

    def __init__(
        self,
        command: Sequence[str],  # the module that each rank runs, and its arguments
        ranks: int,
        rendezvous: RendezvousHandler,
        logs: DefaultLogsSpecs,
        max_restarts: int,
        final: Collection[int],  # exit statuses that are not restarted
        lost: Callable[[], str],  # why, after a failure, the others must go on without this machine
        lost_status: int,  # that of such a failure
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            entrypoint=sys.executable,
            args=("-u", "-m", *command),
            rdzv_handler=rendezvous,
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        super().__init__(spec, logs, log_line_prefix_template="[rank${rank}]:")
        self._final, self._lost, self._lost_status, self._cause = final, lost, lost_status, ""
        # Not those that the launcher, or a command, handles itself.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    @property
    def first_rank(self) -> int:
        """The number in the run of this machine's first rank."""
        return int(self.get_worker_group().workers[0].global_rank)

    def living(self) -> list[subprocess.Popen[bytes]]:
        """Return the ranks that run."""
        return [process for process in self._processes().values() if process.poll() is None]

    def _processes(self) -> dict[int, subprocess.Popen[bytes]]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local: handler.proc for local, handler in handlers.items()}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meeting = True
        if not self.restarts:
            raise RuntimeError("stopped before the ranks started again")
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            # The ranks of several machines would meet at one store in all starts: after a restart
            # they would read keys of an earlier one, at the address of a machine that may be gone.
            handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._cause:
            most, machines = worker_group.spec.max_restarts, worker_group.group_world_size or 1
            done, world = most - self._remaining_restarts, worker_group.workers[0].world_size
            size = f"{machines} machine{'s'[: machines > 1]}, {world} rank{'s'[: world > 1]}"
            line = f"restart ({done} of {most} after failures): {self._cause}; {size}"
            with contextlib.suppress(OSError):  # a terminal that hung up
                print(line, file=sys.stderr, flush=True)
        started: dict[int, Any] = super()._start_workers(worker_group)
        self.meeting = False
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self.living():  # none has failed
            self._cause = "the machines of the run changed"
        self._shutdown(signal.SIGUSR2)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {local: process.poll() for local, process in self._processes().items()}
        failed = [local for local, code in codes.items() if code]
        left = [local for local, code in codes.items() if code is None]
        if left and not failed:
            return RunResult(state=WorkerState.HEALTHY)
        assert self._pcontext is not None  # the ranks have started
        self._pcontext.close(signal.SIGTERM, GRACE_SECONDS)
        result = super()._monitor_workers(worker_group)
        if failed:
            first = self.first_rank
            rank = min((first + local for local in failed), key=lambda r: self._order(result, r))
            found, output = result.failures[rank], self._pcontext.stdouts[rank - first]
            codes = {local: process.poll() for local, process in self._processes().items()}
            stuck = [first + local for local in left if codes[local] == -signal.SIGKILL]
            error, status = _reported(found).strip().partition("\n")[0], found.exitcode
            if self.restarts and status not in self._final and (lost := self._lost()):
                status, error = self._lost_status, "; ".join(filter(None, (error, lost)))
            self.failure = Failure(rank, status, error, Path(output).parent, stuck)
            self._cause = str(self.failure)
            if not self.restarts or status in self._final:
                self._remaining_restarts = 0
        return result

    def _order(self, result: RunResult, rank: int) -> tuple[bool, bool, int, int]:
        """Order the ranks that ended by themselves: the cause, then those that saw its end."""
        found = result.failures[rank]
        # A rank that a signal ends reports nothing, and makes the others fail.
        killed = found.exitcode < 0 and not _reported(found)
        return found.exitcode not in self._final, not killed, found.timestamp, rank


def _reported(failure: ProcessFailure) -> str:
    """Return the error that a rank has left for torchrun; empty if it left none."""
    message: Any = failure.message
    return str(message["message"]) if isinstance(message, dict) else ""
