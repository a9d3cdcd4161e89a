# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that commands start: their records, failures and stops; tests/integration has whole ones."""

import json
import sys

import pytest

from torchtitan_lr.scaling import experiments
from torchtitan_lr.scaling.experiments import (
    RunFailedError,
    start,
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


def test_a_failure_is_the_launchers_last_line(monkeypatch, tmp_path):
    program = "import sys; print('error: rank 1 failed: x\\nmore', file=sys.stderr); sys.exit(1)"
    stand_in(monkeypatch, program)
    with pytest.raises(RunFailedError, match=r"^error: rank 1 failed: x$"):
        start("a.toml", tmp_path, []).finish()
    stand_in(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(RunFailedError, match="ended with status 3"):
        start("a.toml", tmp_path, []).finish()


def test_arguments_and_environment(monkeypatch, tmp_path):
    program = (
        "import os, sys, json; json.dump([sys.argv[1:], os.environ['NGPU'], os.environ['X']],"
        f" open({str(tmp_path / 'seen')!r}, 'w'))"
    )
    stand_in(monkeypatch, program)
    start("a.toml", tmp_path, ["--training.steps=3"], ranks=3, variables={"X": "y"}).finish()
    arguments, ranks, x = json.loads((tmp_path / "seen").read_text())
    assert arguments == [
        "--job.config_file=a.toml",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=3",
    ]
    assert (ranks, x) == ("3", "y")
