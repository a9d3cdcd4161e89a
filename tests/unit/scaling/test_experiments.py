# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that commands start: their records, failures and stops; tests/integration has whole ones."""

import os
import sys

import pytest

from torchtitan_lr.scaling import start as starting
from torchtitan_lr.scaling.start import RunFailedError, run_on_ranks, start

POPEN = starting.subprocess.Popen


def stand_in(monkeypatch, program):
    """Let a few lines of Python stand where the launcher's module stands."""
    started = []

    def popen(command, **options):
        assert command[1:4] == ["-m", "torchtitan_lr", "train"]
        started.append(POPEN([sys.executable, "-c", program, *command[4:]], **options))
        return started[-1]

    monkeypatch.setattr(starting.subprocess, "Popen", popen)
    return started


def test_a_failure_is_the_launchers_last_line(monkeypatch, tmp_path):
    program = "import sys; print('error: rank 1 failed: x\\nmore', file=sys.stderr); sys.exit(1)"
    stand_in(monkeypatch, program)
    with pytest.raises(RunFailedError, match=r"^error: rank 1 failed: x$"):
        start("a.toml", tmp_path, []).finish()
    stand_in(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(RunFailedError, match="ended with status 3"):
        start("a.toml", tmp_path, []).finish()


def test_ranks_that_fail_are_one_line_and_a_folder(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from torchtitan_lr.scaling.start import report_from_rank\n"
        "report_from_rank(lambda _: 1 // 0, [])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RunFailedError) as info:
        run_on_ranks("broken", [], ranks=1)
    (kept,) = tmp_path.glob("torchtitan_lr-ranks-*/*/attempt_0/0")
    line = "error: rank 0 failed: ZeroDivisionError: integer division or modulo by zero"
    assert str(info.value) == f"{line}; its output: {kept}"
    assert "Traceback" in (kept / "stderr.log").read_text()
