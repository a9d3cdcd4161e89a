# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that commands start: their records, failures and stops; tests/integration has whole ones."""

import os
import signal
import sys
import threading
import time

import pytest

from torchtitan_lr.scaling import experiments
from torchtitan_lr.scaling.experiments import (
    launch,
)

POPEN = experiments.subprocess.Popen


def stand_in(monkeypatch, program):
    """Let a few lines of Python stand where the launcher's module stands."""
    started = []

    def popen(command, **options):
        assert command[1:4] == ["-m", "torchtitan_lr", "train"]
        started.append(POPEN([sys.executable, "-c", program, *command[4:]], **options))
        return started[-1]

    monkeypatch.setattr(experiments.subprocess, "Popen", popen)
    return started


def is_in(function, thread):
    """Whether a thread runs a function, or what that called."""
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_stop_is_passed_on_and_waited_for(monkeypatch, tmp_path):
    program = (
        "import os, signal, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "read, write = os.pipe()\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(write, b'1'))\n"
        "(folder / 'ready').open('w').close()\n"
        "os.read(read, 1)\n"
        "(folder / 'saved').touch()"
    )
    os.mkfifo(tmp_path / "ready")
    started = stand_in(monkeypatch, program)
    main = threading.main_thread()

    def interrupt():
        (tmp_path / "ready").open().close()  # opens when the other side does
        while not is_in(POPEN.wait, main):
            time.sleep(0.001)
        # To the main thread, as the kernel would: that one waits.
        signal.pthread_kill(main.ident, signal.SIGINT)

    # Tests of other commands leave their own handlers behind.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            launch("a.toml", tmp_path, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].returncode == 0  # known: it was waited for
    assert (tmp_path / "saved").exists()
