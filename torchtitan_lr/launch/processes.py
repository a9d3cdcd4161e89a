# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Signals and ends of the processes of a launch: the launcher, and the ranks below it.

On SIGTERM torchrun kills its ranks, prints a traceback and fails even if the ranks exit with 0.
Therefore the launcher passes a signal on, and the ranks end by themselves. On Linux no rank that
calls `begin_rank` is orphaned: the kernel kills it when the launcher ends.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from torchtitan_lr.compat.interpreter import end_with, run_exit_functions
from torchtitan_lr.console.log import say

if TYPE_CHECKING:  # it imports torch
    from torchtitan_lr.compat.elastic import Agent

SAME_SIGNAL_SECONDS = 1.0
"""Time in which a second signal is the first one once more."""

LAUNCHER_VARIABLE = "TORCHTITAN_LR_LAUNCHER"
"""Environment variable of the ranks: the launcher's process id."""


class Signals:
    """Passes the launcher's signals on to its ranks.

    The first SIGTERM, SIGINT or SIGHUP (as SIGTERM) goes to all ranks: those that train end their
    step and save, and those that have not begun end at once. A second signal kills, unless it
    follows within a second: ``timeout`` signals a process and then its whole group. SIGUSR1 is a
    scheduler's notice: it acts like SIGTERM as the first signal, and after another one, or
    repeated, it changes nothing. `end` records and tells why this process ends without ranks.
    """

    def __init__(self, end: Callable[[str], object]) -> None:
        self.agent: Agent | None = None  # of the ranks, once there is one
        self.number = 0  # the first signal received
        self.killed = False  # whether a second one has killed the ranks
        self._tell_end, self._when = end, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            # Keep signals ignored that ``nohup`` or ``cmd &`` set to be ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)

    @property
    def why(self) -> str:
        """Why a run ends that does not train; in a line."""
        name = signal.Signals(self.number).name
        return f"killed by {name}" if self.killed else f"stopped before training began by {name}"

    @property
    def passed_on(self) -> int:
        """The signal that the ranks got."""
        return signal.SIGTERM if self.number == signal.SIGHUP else self.number

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = time.monotonic() - self._when > SAME_SIGNAL_SECONDS
        if not self.number:
            self._when = time.monotonic()
            self._stop(number)
        elif again and signal.SIGUSR1 not in (number, self.number):
            self._kill()

    def _stop(self, number: int) -> None:
        self.number = number
        if self.agent is None or self.agent.meeting:  # no rank trains
            self._end()
        self.agent.restarts = False
        for rank in self.agent.living():
            rank.send_signal(self.passed_on)
        line = "training ends its step, saves and stops; again, it is killed"
        say(f"{signal.Signals(number).name}: {line}")

    def _kill(self) -> None:
        self.killed = True
        ranks = [] if self.agent is None else self.agent.living()
        for rank in ranks:  # each is the leader of its own session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        if not ranks:
            self._end()

    def _end(self) -> NoReturn:
        try:
            self._tell_end(self.why)
        finally:  # whatever fails there
            exit_without_teardown(128 + self.number)


def begin_rank() -> None:
    """Bind a rank to the launcher, or to torchrun; call this before the slow imports.

    Until training handles it, Ctrl-C ends the rank as SIGTERM does, without a traceback.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with(int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid()))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def exit_without_teardown(status: int) -> NoReturn:
    """Run the atexit functions, flush the streams, then call os._exit.

    Interpreter shutdown can crash in a background thread of torch's libraries, which would abort a
    rank that has finished its work.
    """
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)
