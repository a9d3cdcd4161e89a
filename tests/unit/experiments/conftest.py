# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import sys
from pathlib import Path

import pytest

from torchtitan_lr.experiments import sweep

POPEN = sweep.subprocess.Popen


@pytest.fixture
def standin(monkeypatch):
    """Starts `standin.py` in place of the launcher; returns the commands that were started."""
    started = []

    def popen(command, **options):
        if command[1:4] != ["-m", "torchtitan_lr", "train"]:  # matplotlib looks for fonts
            return POPEN(command, **options)
        started.append(command[4:])
        program = str(Path(__file__).with_name("standin.py"))
        return POPEN([sys.executable, "-S", program, *command[4:]], **options)

    monkeypatch.setattr(sweep.subprocess, "Popen", popen)
    monkeypatch.setenv("NGPU", "1")
    return started
