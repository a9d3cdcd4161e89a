# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``python -m torchtitan_lr NAME`` and ``torchrun -m torchtitan_lr NAME``: see `commands.main`.

This module imports nothing slow: a signal during a command's own imports finds its handler.
"""

import locale
import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run a subcommand as this process; return the exit status."""
    own_process()
    number = signal.SIGINT
    try:
        from torchtitan_lr.commands.main import main as command

        return command()
    except KeyboardInterrupt as stop:
        number = signal.Signals(*(stop.args or [number]))
    print(f"error: stopped by {number.name}", file=sys.stderr, flush=True)
    os._exit(128 + number)  # a library's threads may still work


def own_process() -> None:
    """Set up this process for one command: its streams and its signals."""
    # A signal raises KeyboardInterrupt, so that the command cleans up. Signals that ``nohup`` or
    # ``cmd &`` set to be ignored stay so. A rank of torchrun keeps Python's handlers: torchrun
    # sends SIGTERM to the others when one rank has failed.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell has closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    _read_in_utf8()
    # A terminal of another encoding shows what it lacks as an escape, as stderr always does.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends two
    raise KeyboardInterrupt(number)


def _read_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if its locale has another encoding."""
    # Files and their names are UTF-8, those of torch's own source too. The terminal's encoding
    # stays.
    if sys.flags.ignore_environment or locale.getpreferredencoding(False).lower() == "utf-8":
        return
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
