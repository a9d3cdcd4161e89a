# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The processes of one launch: torchrun in its own session, and its ranks.

On SIGTERM torchrun kills its ranks, prints a traceback and fails even if the ranks exit with 0.
Therefore only the launcher receives signals and forwards them to the ranks; torchrun then sees the
ranks exit normally. On Linux no process is orphaned: the kernel kills torchrun when the launcher
dies and the ranks when torchrun dies; torchrun ends all ranks when one has ended
(:mod:`torchtitan_lr.launch.agent`).
"""

import contextlib
import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from torchtitan_lr.compat.interpreter import end_with, run_exit_functions

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_CONSOLE_LINE = re.compile(rb"\[rank\d+\]:|restart")
RANK_STARTED = "started as rank"
"""In the line ``process PID started as rank R (local_rank: L)`` of `torchtitan_lr.launch.agent`."""
_STARTED_LINE = re.compile(
    rb"process (\d+) " + RANK_STARTED.encode() + rb" (\d+) \(local_rank: (\d+)"
)
_LINE_OF_RANK = re.compile(rb"\[rank(\d+)\]:")
_WATCH_SECONDS = 0.5
WAITING_SECONDS = 10.0
"""Time until the console says that other machines are missing; then twice as long, and so on."""
SAME_SIGNAL_SECONDS = 1.0
"""Time in which a second signal is the first one once more."""
_END_SECONDS = 15  # for torchrun to end when a signal finds no rank: it may have to restart them


class RankGroup:
    """Starts a command and its ranks, and stops them on a signal.

    The first SIGTERM, SIGINT or SIGHUP (as SIGTERM) is forwarded to the ranks if all of them have
    installed a handler: they finish the step and save. Ranks that have already ended are skipped.
    Before the handlers are installed there is nothing to save, so the ranks are killed. A second
    signal also kills them, unless it follows within a second: ``timeout`` signals a process and
    then its whole group. SIGUSR1 is a scheduler's notice: it acts like SIGTERM as the first signal,
    and after another one, or repeated, it changes nothing.

    torchrun may start the ranks again after a failure. Ranks that start after a signal are killed.

    Args:
        command: The command to run, in its own session.
        variables: Its environment.
        console_log: File for the command's stderr; the ranks' lines also go to the console.
        expected: Number of ranks below the command; 0 if the command is the only rank.
        shown: Ranks whose lines the console shows, by their number in the run; None for all lines
            of the command, which then chooses itself.
        missing: What is said while no rank has started.

    Attributes:
        signal_number: The first signal received, 0 if none.
        killed: Whether the ranks were killed instead of stopped by SIGTERM.
        was_ready: Whether all ranks of the last start had their handlers, at or before the first
            signal.
        local_ranks: Numbers on this machine of the ranks that have started, by their number in the
            run.
    """

    def __init__(
        self,
        command: list[str],
        variables: dict[str, str],
        console_log: Path,
        expected: int,
        shown: Collection[int] | None = None,
        missing: str = "",
    ) -> None:
        self.signal_number = 0
        self.killed = False
        self.was_ready = False
        self.local_ranks: dict[int, int] = {}
        self._expected, self._shown, self._missing = expected, shown, missing
        self._began = time.monotonic()
        self._next_notice = WAITING_SECONDS
        self._ranks: list[int] = []  # of all starts; the reader appends them
        self._seen = 0
        self._signalled = self._deadline = math.inf  # of the monotonic clock
        self._process: subprocess.Popen[bytes] | None = None
        for number in _FORWARDED:
            # Keep signals ignored that ``nohup`` or ``cmd &`` set to be ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._process = subprocess.Popen(
            command,
            env=variables,
            start_new_session=True,
            stdout=None if shown is None else subprocess.PIPE,
            stderr=subprocess.PIPE if expected else None,
            preexec_fn=functools.partial(end_with, os.getpid()),
        )
        self._reader = threading.Thread(target=self._relay, args=(console_log,), daemon=True)
        self._output_reader = threading.Thread(target=self._relay_output, daemon=True)
        if expected:
            self._reader.start()
        if shown is not None:
            self._output_reader.start()
        if self.signal_number:  # received while the process was being started
            self._kill()

    @property
    def signal_name(self) -> str:
        """Name of the first signal received."""
        return signal.Signals(self.signal_number).name

    def wait(self) -> int:
        """Wait for all ranks to end.

        Returns:
            The command's exit status, negative if a signal ended it.
        """
        assert self._process is not None  # __init__ has started it
        while (status := self._process.poll()) is None:
            # Signal handlers run in both waits. The reader ends with torchrun, without a poll.
            if self._reader.is_alive():
                self._reader.join(timeout=_WATCH_SECONDS)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_WATCH_SECONDS)
            self._watch()
            self._say_missing()
            if self.signal_number and time.monotonic() > self._deadline:
                self._kill()
        for reader in (self._reader, self._output_reader):
            if reader.ident is not None:  # it was started
                reader.join(timeout=10.0)
        return status

    def _say_missing(self) -> None:
        """Say, at growing intervals, for what the first start waits."""
        waited = time.monotonic() - self._began
        if self._missing and not self._ranks and waited > self._next_notice:
            print(f"waiting for {waited:.0f} s: {self._missing}", flush=True)
            self._next_notice *= 2

    def _watch(self) -> None:
        """Store whether all ranks are ready: when they end one by one, they cannot be inspected."""
        if len(self._ranks) > self._seen:
            self._seen = len(self._ranks)
            self.was_ready = False
            if self.signal_number:  # torchrun has started them again
                self._kill()
        if not self.was_ready and not self.signal_number:
            self.was_ready = len(self._with_handler()) == max(1, self._expected)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self.signal_number = number
            return
        if self.signal_number:
            again = time.monotonic() - self._signalled > SAME_SIGNAL_SECONDS
            if again and signal.SIGUSR1 not in (number, self.signal_number):
                self._kill()
            return
        self._watch()
        self.signal_number, self._signalled = number, time.monotonic()
        if not self.was_ready:
            self._kill()
            return
        # A rank without a handler has finished training; the signal would make it fail.
        ranks = self._with_handler()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if not ranks:
            self._deadline = time.monotonic() + _END_SECONDS
            return
        # Not by `print`, into which the signal may have come. A step may take minutes.
        line = f"{self.signal_name}: the run ends its step, saves and stops; again, it is killed\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())

    def _with_handler(self) -> list[int]:
        """Return the living ranks that handle SIGTERM."""
        assert self._process is not None
        if not self._expected:
            return [self._process.pid] if _handles_sigterm(self._process.pid, os.getpid()) else []
        last = self._ranks[-self._expected :]
        return [pid for pid in last if _handles_sigterm(pid, self._process.pid)]

    def _kill(self) -> None:
        assert self._process is not None
        self.killed = True
        # Each rank is the leader of its own session. torchrun ends first: it starts no more.
        for pid in (self._process.pid, *self._ranks[-self._expected :]):
            if pid == self._process.pid or _status_of(pid, self._process.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _relay(self, console_log: Path) -> None:
        """Copy the command's stderr to the log, and the ranks' lines to the console."""
        assert self._process is not None and self._process.stderr is not None
        try:
            console_log.touch()
        except OSError:  # for example a full disk: still show the ranks' lines
            console_log = Path(os.devnull)
        with console_log.open("wb", buffering=0) as log:
            for line in self._process.stderr:
                _write(log, line)
                if started := _STARTED_LINE.match(line):
                    pid, rank, local_rank = (int(number) for number in started.groups())
                    self._ranks.append(pid)
                    self.local_ranks[rank] = local_rank
                if _CONSOLE_LINE.match(line) and self._is_shown(line):
                    _write(sys.stderr.buffer, line)

    def _relay_output(self) -> None:
        """Copy the shown ranks' lines from the command's stdout to the console."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if self._is_shown(line):
                _write(sys.stdout.buffer, line)

    def _is_shown(self, line: bytes) -> bool:
        of_rank = _LINE_OF_RANK.match(line)
        return self._shown is None or of_rank is None or int(of_rank[1]) in self._shown


def _write(file: IO[bytes], line: bytes) -> None:
    """Write a line and ignore errors: torchrun blocks if its stderr is not read."""
    with contextlib.suppress(OSError):
        file.write(line)
        file.flush()


def _status_of(pid: int, parent: int) -> str | None:
    """Return /proc's status of a living child of a process; None for another, "" without /proc.

    A process id is given again after its process has ended, so that the parent is compared.
    """
    if sys.platform != "linux":
        return ""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    is_child = re.search(rf"^PPid:\s*{parent}$", status, re.MULTILINE)
    return status if is_child and not re.search(r"^State:\s*Z", status, re.MULTILINE) else None


def _handles_sigterm(pid: int, parent: int) -> bool:
    """Return whether a living child handles SIGTERM; True on platforms where this is unknown."""
    status = _status_of(pid, parent)
    if status is None:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is None or bool(int(caught.group(1), 16) >> (signal.SIGTERM - 1) & 1)


def end_with_torchrun() -> None:
    """Call `end_with` in a rank that torchrun started; do this before the slow imports.

    The launcher sets this up before its ranks start (:mod:`.agent`). This function is for ranks of
    plain torchrun; it has no effect if torchrun was killed before the call.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())


def exit_without_teardown(status: int) -> NoReturn:
    """Run the atexit functions, flush the streams, then call os._exit.

    Interpreter shutdown can crash in a background thread of torch's libraries, which would abort a
    rank that has finished its work.
    """
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
