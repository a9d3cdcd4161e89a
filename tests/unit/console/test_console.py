# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The console: which lines are shown, and the progress of long work."""

import io
import logging
import re
import sys
import warnings

import pytest

from torchtitan_lr.console import progress as bars
from torchtitan_lr.console.log import console, init_console
from torchtitan_lr.console.progress import progress


@pytest.fixture
def log():
    """Puts the handlers of the log back."""
    root = logging.getLogger()
    before, level, show = list(root.handlers), root.level, warnings.showwarning
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, warnings.showwarning = before, level, show


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
    shown = [re.sub(r"^[\d:]+ ", "", line) for line in capsys.readouterr().out.splitlines()]
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    assert list(progress("abc", "validation", 3)) == ["a", "b", "c"]  # the control: it is short
    assert capsys.readouterr() == ("", "")
    for name in ("BAR_DELAY", "LINE_SECONDS"):
        monkeypatch.setattr(bars, name, 0.0)
    assert list(progress("abc", "validation", 3)) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("validation:  33%") and "1.00/3.00" in lines[1]
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress("abc", "validation", 3, shown=False)) == ["a", "b", "c"]
    assert sys.stderr.getvalue() == ""
    assert list(progress("abc", "validation", 3)) == ["a", "b", "c"]
    drawn = sys.stderr.getvalue()
    assert "validation:" in drawn and "0.00/3.00" in drawn and "\r" in drawn
    assert drawn.rstrip(" ").endswith("\r")  # nothing is left of it
