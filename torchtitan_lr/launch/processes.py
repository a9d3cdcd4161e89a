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
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from torchtitan_lr.compat.interpreter import end_with, run_exit_functions

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_CONSOLE_LINE = re.compile(rb"\[rank\d+\]:|restart")
_END_SECONDS = 15  # for torchrun to end when a signal finds no rank: it may have to restart them


class RankGroup:
    """Starts a command and its ranks, and stops them on a signal.

    The first SIGTERM, SIGINT or SIGHUP (as SIGTERM) is forwarded to the ranks if all of them have
    installed a handler: they finish the step and save. Ranks that have already ended are skipped.
    Before the handlers are installed there is nothing to save, so the ranks are killed. A second
    signal also kills them. SIGUSR1 is a scheduler's notice: it acts like SIGTERM as the first
    signal, and after another one, or repeated, it changes nothing.

    torchrun may start the ranks again after a failure. Ranks that start after a signal are killed.

    Args:
        command: The command to run, in its own session.
        variables: Its environment.
        console_log: File for the command's stderr; the ranks' lines also go to the console.
        expected: Number of ranks below the command; 0 if the command is the only rank.

    Attributes:
        signal_number: The first signal received, 0 if none.
        killed: Whether the ranks were killed instead of stopped by SIGTERM.
        was_ready: Whether all ranks of the last start had their handlers, at or before the first
            signal.
    """

    def __init__(
        self, command: list[str], variables: dict[str, str], console_log: Path, expected: int
    ) -> None:
        self.signal_number = 0
        self.killed = False
        self.was_ready = False
        self._expected = expected
        self._known: set[int] = set()
        self._deadline = math.inf
        self._process: subprocess.Popen[bytes] | None = None
        for number in _FORWARDED:
            # Keep signals ignored that ``nohup`` or ``cmd &`` set to be ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._process = subprocess.Popen(
            command,
            env=variables,
            start_new_session=True,
            stderr=subprocess.PIPE if expected else None,
            preexec_fn=functools.partial(end_with, os.getpid()),
        )
        self._reader = threading.Thread(target=self._relay, args=(console_log,), daemon=True)
        if expected:
            self._reader.start()
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
        while True:
            # Wait in short intervals: on every platform signal handlers run between them.
            try:
                status = self._process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                self._watch()
                if self.signal_number and time.monotonic() > self._deadline:
                    self._kill()
        if self._expected:
            self._reader.join(timeout=10.0)
        return status

    def _watch(self) -> None:
        """Store whether all ranks are ready: when they end one by one, they cannot be inspected."""
        ranks = set(self._rank_pids())
        if ranks - self._known and self._expected:
            self._known |= ranks
            self.was_ready = False
            if self.signal_number:  # torchrun has started them again
                self._kill()
        if not self.was_ready and not self.signal_number and self._all_ready():
            self.was_ready = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self.signal_number = number
            return
        if self.signal_number:
            if signal.SIGUSR1 not in (number, self.signal_number):
                self._kill()
            return
        self._watch()
        self.signal_number = number
        if not self.was_ready:
            self._kill()
            return
        if not self._rank_pids():
            self._deadline = time.monotonic() + _END_SECONDS
        # A rank without a handler has finished training; the signal would make it fail.
        for pid in filter(_handles_sigterm, self._rank_pids()):
            _send(pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def _all_ready(self) -> bool:
        ranks = self._rank_pids()
        return len(ranks) == max(1, self._expected) and all(map(_handles_sigterm, ranks))

    def _rank_pids(self) -> list[int]:
        assert self._process is not None
        return child_pids(self._process.pid) if self._expected else [self._process.pid]

    def _kill(self) -> None:
        assert self._process is not None
        self.killed = True
        # Each rank is the leader of its own session.
        for pid in (self._process.pid, *child_pids(self._process.pid)):
            _send_group(pid, signal.SIGKILL)

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
                if _CONSOLE_LINE.match(line):
                    _write(sys.stderr.buffer, line)


def _write(file: IO[bytes], line: bytes) -> None:
    """Write a line and ignore errors: torchrun blocks if its stderr is not read."""
    with contextlib.suppress(OSError):
        file.write(line)
        file.flush()


def child_pids(parent: int) -> list[int]:
    """List the living children of a process.

    Returns:
        Process ids in ascending order; zombies are left out.
    """
    rows = _proc_table() if sys.platform == "linux" else _ps_table()
    return sorted(pid for pid, ppid, state in rows if ppid == parent and state != "Z")


def _stat_of(pid: int) -> list[str]:
    """Return the fields after a process's name in /proc (state, parent id, ...); [] if it ended."""
    try:
        # The name in parentheses may itself hold blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _proc_table() -> list[tuple[int, int, str]]:
    """Return process id, parent id and state of every process, from /proc."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    stats = ((pid, _stat_of(pid)) for pid in pids)
    # Without fields: it ended meanwhile.
    return [(pid, int(fields[1]), fields[0]) for pid, fields in stats if fields]


def _ps_table() -> list[tuple[int, int, str]]:
    """Return process id, parent id and state of every process, from ps."""
    command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = (line.split() for line in lines)
    return [(int(pid), int(ppid), state[0]) for pid, ppid, state in rows]


def _handles_sigterm(pid: int) -> bool:
    """Return whether a process handles SIGTERM; True on platforms where this is unknown."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return sys.platform != "linux"
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is None or bool(int(caught.group(1), 16) >> (signal.SIGTERM - 1) & 1)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _send_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


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
