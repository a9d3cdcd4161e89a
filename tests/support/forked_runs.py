# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Training runs on CPU ranks that are forked from one process with all imports done.

A small run spends most of its time on imports. Python's fork server imports them once; each rank is
forked from it, executes `torchtitan_lr.train.main` as below the launcher, and ends. Its losses
equal those of the launcher, to the last digit. Accelerators cannot be used after a fork: runs on
them go through the launcher (`torchtitan_lr.scaling.experiments.start`).
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.launch.agent import GRACE_SECONDS, loopback_store
from torchtitan_lr.launch.environment import loopback_variables
from torchtitan_lr.launch.processes import end_with, exit_without_teardown
from torchtitan_lr.scaling.experiments import last_error

_PRELOADED = ("torchtitan_lr.train", "matplotlib.backends.backend_agg", "matplotlib.figure")
_POLL_SECONDS = 0.02


class ForkedRun:
    """A training run on ranks of this machine; it starts at once.

    Args:
        arguments: Of the run, ``--job.config_file`` and ``--job.dump_folder`` included.
        folder: Its dump folder; ``logs/rank_N.log`` below it have the ranks' output.
        ranks: Number of ranks.
        threads: Threads per rank.
        prepare: Called in the process of every rank before it trains, if given.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        ranks: int,
        threads: int,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *_PRELOADED])
        self._store = loopback_store()
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"rank_{rank}.log" for rank in range(ranks)]
        common = loopback_variables() | {
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": str(threads),
            # As below torchrun: the ranks open no store, and ignore a second signal.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "forked",
        }
        for log in self._logs:
            log.write_text("")  # a rank may be ended before it writes
        self._processes: list[Any] = []
        self._spent: list[Connection] = []
        for rank, log in enumerate(self._logs):
            variables = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            spent, own = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(list(arguments), variables, str(log), threads, own, prepare)
            )
            process.start()
            own.close()
            self._processes.append(process)
            self._spent.append(spent)

    def ended(self) -> bool:
        """Return whether all ranks have ended; if one has failed, the others are ended."""
        codes = [process.exitcode for process in self._processes]
        if any(codes) and None in codes:
            # They wait for it in a collective; those that have failed too may print why.
            self._wait(GRACE_SECONDS)
            for process in self._processes:
                process.kill()
            self._wait()
        return all(process.exitcode is not None for process in self._processes)

    def finish(self) -> None:
        """Wait for the end of all ranks.

        Raises:
            RunFailedError: A rank failed.
        """
        while not self.ended():
            time.sleep(_POLL_SECONDS)
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            # Ranks that this process killed say nothing: look first at those that ended themselves.
            rank = max(failed, key=lambda rank: failed[rank])
            raise RunFailedError(last_error(self._logs[rank].read_text(), failed[rank]))

    def cpu_seconds(self) -> float:
        """Return the processor time of all ranks; 0 for those that did not end by themselves."""
        total = 0.0
        for spent in self._spent:
            with contextlib.suppress(EOFError):
                total += spent.recv()
        return total

    def terminate(self) -> None:
        """Pass a stop signal to all ranks, which finish the step and save."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all ranks and wait for their end."""
        for process in self._processes:
            process.kill()
        self._wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to all ranks that have not ended."""
        for process in self._processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def _wait(self, seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        for process in self._processes:
            process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _rank(
    arguments: list[str],
    variables: Mapping[str, str],
    log: str,
    threads: int,
    spent: Connection,
    prepare: Callable[[], None] | None,
) -> None:
    """Execute a rank of a run, in a process of its own."""
    os.setsid()  # only the process that started the run receives Ctrl-C
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    import torch

    from torchtitan_lr.train import main

    torch.set_num_threads(threads)
    if prepare is not None:
        prepare()
    try:
        status = main(arguments)
    except Exception:
        import traceback

        traceback.print_exc()
        status = 1
    spent.send(time.process_time())
    exit_without_teardown(status)
