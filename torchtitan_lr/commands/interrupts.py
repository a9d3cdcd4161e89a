# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A command as a whole process: at any moment a signal ends it in one line, and so does a bug.

The first SIGINT, SIGTERM or SIGHUP raises `KeyboardInterrupt`, so that the command cleans up;
``in_one_line`` of `commands.parser` prints the line. Native code, such as the training of a
tokenizer, holds the main thread for minutes, and libraries swallow exceptions: then a thread ends
the process. What stops its own work on a signal, such as the launcher of ranks, sets handlers of
its own.

This module imports nothing slow: a signal during a command's own imports finds its handler.
"""

import contextlib
import locale
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from torchtitan_lr.errors import escaped

CLEAN_UP_SECONDS = 3.0
"""Time for a command to clean up after a signal."""

_received: list[int] = []  # the first signal; later ones change nothing: `timeout` sends two
_told = threading.Event()


def own_process() -> None:
    """Set up this process for one command: its signals, its streams, what reports a bug.

    Signals that ``nohup`` or ``cmd &`` set to be ignored stay so. A rank of torchrun keeps Python's
    handlers: torchrun sends SIGTERM to the others when one rank has failed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell has closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    _read_in_utf8()
    # A terminal of another encoding shows what it lacks as an escape, as stderr always does.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    sys.excepthook = report_bug
    sys.unraisablehook = _report_unraisable
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    read, write = os.pipe()
    os.set_blocking(write, False)
    # Python calls a handler when native code returns; it writes a signal's number at once.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(read,), daemon=True).start()


def _read_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if its locale has another encoding.

    Files and their names are UTF-8, those of torch's own source too. The terminal's encoding stays.
    """
    if sys.flags.ignore_environment or locale.getpreferredencoding(False).lower() == "utf-8":
        return
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def was_stopped() -> bool:
    """Return whether a signal has stopped the command."""
    return bool(_received)


def end_stopped() -> int:
    """Print the line of a command that a signal has stopped, once; return its exit status."""
    number = _received[0] if _received else signal.SIGINT  # Python's own handler
    if not _told.is_set():
        _told.set()
        with contextlib.suppress(OSError):  # of a terminal that is gone
            os.write(2, f"error: stopped by {signal.Signals(number).name}\n".encode())
    return 128 + number


def report_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print in one line what nothing has handled; a file gets the traceback.

    Args:
        kind: The exception's class.
        error: The exception.
        trace: Where it was raised.
    """
    if _received or issubclass(kind, KeyboardInterrupt):
        os._exit(end_stopped())
    import tempfile
    import traceback

    with contextlib.suppress(OSError):
        place = "nowhere"
        with contextlib.suppress(OSError):
            descriptor, place = tempfile.mkstemp(".txt", "torchtitan_lr-traceback-")
            with open(descriptor, "w", encoding="utf-8") as file:
                traceback.print_exception(kind, error, trace, file=file)
        line = f"error: {kind.__name__}: {error}".partition("\n")[0]
        print(f"{escaped(line)} (a bug: its traceback is in {place})", file=sys.stderr)


def _stop(number: int, frame: FrameType | None) -> None:
    if not _received:
        _received.append(number)
        raise KeyboardInterrupt


def _watch(read: int) -> None:
    """End the process some time after its first signal, unless a part of it handles the signal."""
    while signal.getsignal(number := os.read(read, 1)[0]) is not _stop:
        pass
    time.sleep(CLEAN_UP_SECONDS)
    if not _received:  # native code still holds the main thread
        _received.append(number)
    os._exit(end_stopped())


def _report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Say nothing of the exception of `_stop` where Python cannot raise it."""
    if not (_received and issubclass(unraisable.exc_type, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)
