# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The console: which lines are shown, and the progress of long work."""

import logging
import re
import warnings

import pytest

from torchtitan_lr.console.log import console, init_console


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
