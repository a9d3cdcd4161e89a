# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The console: which lines are shown, what a step's line says, a bar on a real pty."""

import fcntl
import logging
import os
import re
import struct
import sys
import termios
import time
import warnings

import pytest

from torchtitan_lr.console import progress as bars
from torchtitan_lr.console.lines import Pace, duration, step_line, validation_line
from torchtitan_lr.console.log import console, init_console, say
from torchtitan_lr.console.progress import Plain, progress

VALUES = {
    "loss": 6.981234,
    "grad_norm": 0.82125,
    "lr": 4e-3,
    "tokens": 20480,
    "tokens_per_s": 3691.6,
    "mfu": 41.234,
    "memory_gib": 0.734,
}


@pytest.fixture
def log():
    """Puts the handlers of the log back."""
    root = logging.getLogger()
    before, level, show = list(root.handlers), root.level, warnings.showwarning
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, warnings.showwarning = before, level, show


@pytest.fixture
def terminal():
    """A pty: the end that a program reads, and the terminal as a stream."""
    reader, writer = os.openpty()
    os.set_blocking(reader, False)
    with open(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def read_of(reader):
    """What was written to a terminal; the kernel passes it on a moment later."""
    text, until = b"", time.monotonic() + 0.2
    while time.monotonic() < until:
        try:
            text += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    return text.decode()


def speak():
    """What torchtitan, libraries and this package say in a run."""
    root = logging.getLogger()
    root.info("[GC] Initial GC collection took 0.00 seconds")
    root.info("Destroying the purge thread.")
    root.warning("ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 1 will be overridden to 3")
    warnings.warn("DTensor random operators may not have complete support", stacklevel=1)
    logging.getLogger("a.library").warning("12 files have no text")
    root.warning("Warmup steps (15) exceed total steps (4).")
    console.info("step 1/4")


def test_only_what_a_user_reads_is_shown(log, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    init_console()
    speak()
    shown = [re.sub(r"^[\d-]+ [\d:]+ ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "warning: 12 files have no text",
        "warning: Warmup steps (15) exceed total steps (4).",
        "step 1/4",
    ]
    # The rest is kept, and can be shown: the control that all of it was said.
    details = (tmp_path / "details.log").read_text()
    init_console(verbose=True)
    speak()
    for text in ("[GC]", "purge thread", "ENV[", "DTensor random", "12 files", "step 1/4"):
        assert text in details
    # The whole form, on the console as in the file.
    added = (tmp_path / "details.log").read_text()[len(details) :]
    assert capsys.readouterr().out == added and len(added.splitlines()) >= 6


def test_a_folder_without_space_ends_no_run(log, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (tmp_path / "details.log").mkdir()  # cannot be opened
    init_console()
    console.info("step 1/4")
    said = capsys.readouterr()
    assert said.out.endswith(" step 1/4\n") and said.err == ""


def test_a_command_says_it_on_stderr(capsys):
    say("export: 3 of 9 tensors")
    assert capsys.readouterr() == ("", "export: 3 of 9 tensors\n")


def test_the_line_of_a_step():
    assert step_line(10, 150, 3725.4, **VALUES) == (
        "step  10/150 (6.7%)  1:02:05 left  loss 6.98123  grad norm 0.8213  lr 4.00e-03  "
        "20,480 tokens  3,692 tokens/s  MFU 41.23%  memory 0.73 GiB"
    )
    unknown = step_line(1, 150, None, **(VALUES | {"mfu": None}))
    assert "MFU" not in unknown and "  -:--:-- left  " in unknown
    assert validation_line(150, 5.4061, 222.76, 14.21) == (
        "validation after step 150  loss 5.40610  perplexity 222.76  in 14.2 s"
    )


def test_times():
    found = [duration(seconds) for seconds in (0, 59.6, 3600, 90061)]
    assert found == ["0:00:00", "0:01:00", "1:00:00", "1d 1:01:01"]


def test_time_left_by_hand():
    pace = Pace(steps=100)
    # A first step of 500 s, compilation included, does not show how long the others take.
    assert pace.left(1, 500.0) is None
    assert pace.left(11, 520.0) == pytest.approx(2.0 * 89)
    # 30 s of validation count: 50 s for 20 steps.
    assert pace.left(21, 550.0) == pytest.approx(2.5 * 79)
    assert pace.left(100, 900.0) == 0


def test_plain_lines_by_hand():
    clock = iter([0.0, 4.0, 8.0, 12.0, 16.0, 30.0, 100.0, 119.0, 140.0, 150.0]).__next__
    lines = []
    plain = Plain("export", 9, "tensors", clock, lines.append)
    for count in range(1, 10):
        plain.done(count)
    # After 10 s, then 10 s later at the earliest, then after a quarter of the time so far.
    assert lines == [
        "export: 3 of 9 tensors (33%), 0:00:24 left",
        "export: 5 of 9 tensors (56%), 0:00:24 left",
        "export: 6 of 9 tensors (67%), 0:00:50 left",
        "export: 8 of 9 tensors (89%), 0:00:18 left",
    ]
    clock = iter([0.0, 90.0]).__next__
    Plain("reading", None, "documents", clock, lines.append).done(1200)
    assert lines[-1] == "reading: 1,200 documents in 0:01:30"


def test_a_bar_on_a_terminal(terminal, monkeypatch, capsys):
    reader, stream = terminal
    monkeypatch.setattr(bars, "BAR_DELAY", 0.0)
    fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    assert list(progress("abc", "validation", 3)) == ["a", "b", "c"]  # the control: no terminal
    assert read_of(reader) == "" and capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress("abc", "validation", 3, shown=False)) == ["a", "b", "c"]
    assert read_of(reader) == ""
    assert list(progress("abc", "validation", 3)) == ["a", "b", "c"]
    drawn = read_of(reader)
    assert "validation:" in drawn and "0/3" in drawn and "\r" in drawn
    assert drawn.rstrip(" ").endswith("\r")  # nothing is left of it
