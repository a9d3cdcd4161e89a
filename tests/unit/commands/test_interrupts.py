# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Signals and bugs end a command in one line, whatever it is doing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, os, sys, time
from torchtitan_lr.commands import interrupts

interrupts.CLEAN_UP_SECONDS = float(sys.argv[2])
interrupts.own_process()
from torchtitan_lr.commands.parser import in_one_line


class Unraisable:
    def __del__(self):
        time.sleep(100)


@in_one_line
def main(argv=None):
    what = sys.argv[1]
    try:
        print("ready", flush=True)
        if what == "native":  # minutes, in which Python calls no handler
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        if what == "unraisable":
            Unraisable()
        time.sleep(100)
    except KeyboardInterrupt:
        if what == "swallowed":
            time.sleep(100)
        if what == "replaced":
            raise SystemError("a library's") from None
        raise
    finally:
        print("cleaned up", flush=True)


sys.exit(main())
"""
STUCK = ("native", "unraisable", "swallowed")


def start(*arguments, **options):
    command = [sys.executable, "-c", PROGRAM, *arguments]
    options = {"preexec_fn": heed} | options
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, **options)


def heed():
    """Receive all signals, also where the tests were started with `&`, which ignores SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("what", ["sleeps", "replaced", *STUCK])
def test_a_signal_ends_in_one_line(what, number):
    # Who is not stuck has all the time of this test.
    with start(what, "0.2" if what in STUCK else "900") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        process.send_signal(number)  # as `timeout` does
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (128 + number, f"error: stopped by {number.name}\n")
    assert what in STUCK or out == "cleaned up\n"


def test_a_signal_that_nohup_ignores_stays_ignored():
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with start("sleeps", "900", preexec_fn=ignore) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert err == "error: stopped by SIGTERM\n"


def test_a_bug_is_one_line_and_its_traceback_a_file(tmp_path):
    program = "from torchtitan_lr.commands.interrupts import *; own_process(); {}['key']"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"TMPDIR": str(tmp_path)}, timeout=300
    )
    (kept,) = tmp_path.iterdir()
    assert done.returncode == 1
    assert done.stderr == f"error: KeyError: 'key' (a bug: its traceback is in {kept})\n"
    assert "Traceback (most recent call last)" in kept.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        ("config list >/dev/full", 1, "error: No space left on device\n"),
        *(("config list >&-", 0, ""), ("config list 2>&-", 0, "")),
        (
            "generate x --prompts - <&-",
            *(2, "error: --prompts: got '-', expected at least one line that is not empty\n"),
        ),
    ],
)
def test_streams_that_are_closed_or_full(words, status, error):
    command = f"'{sys.executable}' -m torchtitan_lr {words}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (status, error)


def test_files_are_utf8_and_a_terminal_without_a_letter_shows_its_escape(tmp_path):
    (tmp_path / "gäbe.txt").write_text("caf\u6f22", encoding="utf-8")
    program = "from torchtitan_lr.commands.interrupts import own_process; own_process()\n"
    program += "import os, sys; print(sys.argv[1], open(sys.argv[1]).read())"
    found = subprocess.run(
        [sys.executable, "-c", program, "gäbe.txt"],
        env=dict(os.environ, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C"),
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert found.stdout == b"g\\xe4be.txt caf\\u6f22\n"
