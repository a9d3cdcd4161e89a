# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A command as a whole process: signals, streams and encodings; errors as one line and a status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lr.commands.parser import in_one_line
from torchtitan_lr.errors import ConfigError, RunFailedError

PROGRAM = """
import sys, time
from torchtitan_lr.commands import main


def command():
    try:
        print("ready", flush=True)
        time.sleep(100)
    finally:
        print("cleaned up", flush=True)


main.main = command
from torchtitan_lr.__main__ import main

sys.exit(main())
"""


def start(ignored=()):
    """Start a command that receives all signals but the ignored ones, also below ``cmd &``."""

    def heed():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, preexec_fn=heed)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_in_one_line(number):
    with start() as process:
        process.send_signal(number)
        process.send_signal(number)  # as `timeout` does
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (128 + number, f"error: stopped by {number.name}\n")
    assert out == "cleaned up\n"


def test_a_signal_that_nohup_ignores_stays_ignored():
    with start([signal.SIGHUP]) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert err == "error: stopped by SIGTERM\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        ("config list >/dev/full", 1, "error: No space left on device\n"),
        *(("config list >&-", 0, ""), ("config list 2>&-", 0, ""), ("config list <&-", 0, "")),
    ],
)
def test_streams_that_are_closed_or_full(words, status, error):
    command = f"'{sys.executable}' -m torchtitan_lr {words}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (status, error)


def test_files_are_utf8_and_a_terminal_without_a_letter_shows_its_escape(tmp_path):
    (tmp_path / "gäbe.txt").write_text("caf\u6f22", encoding="utf-8")
    program = "from torchtitan_lr.__main__ import own_process; own_process()\n"
    program += "import os, sys; print(sys.argv[1], open(sys.argv[1]).read())"
    found = subprocess.run(
        [sys.executable, "-c", program, "gäbe.txt"],
        env=dict(os.environ, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C"),
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert found.stdout == b"g\\xe4be.txt caf\\u6f22\n"


def test_refusals_and_failed_runs_become_a_status(capsys):
    def main(argv):
        raise {"refused": ConfigError("a.b", 3, "4"), "failed": RunFailedError("error: x")}[argv]

    assert in_one_line(main)("refused") == 2
    assert capsys.readouterr().err == "error: a.b: got 3, expected 4\n"
    assert in_one_line(main)("failed") == 1
    assert capsys.readouterr().err == "error: x\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "error: No space left on device"),
        (OSError(30, "Read-only file system", "/a/b"), "error: /a/b: Read-only file system"),
        (PermissionError(13, "Permission denied", "/a"), "error: /a: Permission denied"),
        (MemoryError(), "error: too little memory: the machine has no more"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "error: too little mem"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_errors_of_the_system_are_one_line(error, line, wrapped, capsys):
    @in_one_line
    def fails(argv=None):
        if not wrapped:
            raise error
        raise ValueError(f"a library's own: {error}") from error

    assert fails([]) == 1
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith(line)
