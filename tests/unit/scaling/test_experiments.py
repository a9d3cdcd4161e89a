# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that commands start: their records, failures and stops; tests/integration has whole ones."""

import json
import sys

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling import experiments
from torchtitan_lr.scaling.experiments import (
    RunFailedError,
    place_run,
    start,
    step_records,
)

LOSS = "loss_metrics/global_avg_loss"


def test_records_of_repeated_steps_count_once(tmp_path):
    records = [{"step": s, LOSS: v} for s, v in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 8.5))]
    records.append({"step": 3, "validation_metrics/loss": 6.0})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "lo')  # cut off by a kill
    assert [(r["step"], r[LOSS]) for r in step_records(tmp_path)] == [(1, 9.0), (2, 8.5), (3, 7.0)]
    assert step_records(tmp_path / "nowhere") == []


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


def test_runs_are_checked_for_their_ranks(monkeypatch):
    monkeypatch.setenv("NGPU", "4")
    config = "--job.config_file=train_configs/debug_cola.toml"
    assert place_run([config]).config.model.name == "llama_cola"
    with pytest.raises(ConfigError, match="tensor_parallel_degree"):
        place_run([config], ranks=3)
    with pytest.raises(ConfigError, match=r"low_rank\.depth"):
        place_run([config, "--low_rank.depth=3"])
    for variable, value in (("NNODES", "2"), ("COMM_MODE", "fake_backend")):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=variable):
            patch.setenv(variable, value)
            patch.setenv("RDZV_ENDPOINT", "host:1")
            place_run([config])


def test_report_from_rank_does_nothing_outside_a_rank():
    experiments.report_from_rank(lambda _: pytest.fail("this is no rank"), [])
