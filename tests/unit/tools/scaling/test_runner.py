# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How the runs of an experiment start, fail and stop; whole runs are in tests/integration."""

import os
import signal
from types import SimpleNamespace

import pytest

from torchtitan_lr.tools.experiments import Stopped
from torchtitan_lr.tools.scaling import runner as module
from torchtitan_lr.tools.scaling.experiment import read_experiment
from torchtitan_lr.tools.scaling.plan import Plan
from torchtitan_lr.tools.scaling.runner import Runner

TOML = """
name = "x"
config = "debug_full"
seeds = [0, 1]
tokens_per_parameter = [0.01]
learning_rate.grid = [1e-3]

[families.full]

[sizes.a]
dim = 16
ffn_dim = 48
n_layers = 1
n_heads = 2
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "x.toml").write_text(TOML)
    return Plan(read_experiment(str(tmp_path / "x.toml")), tmp_path / "work")


class Job:
    """Stands where a run stands: it ends when it is terminated."""

    def __init__(self):
        self.terminated = False

    def ended(self):
        return self.terminated

    def terminate(self):
        self.terminated = True

    def finish(self):
        assert self.terminated


def test_a_stop_waits_for_a_run_that_is_just_starting(plan, tmp_path, monkeypatch):
    started = []

    def job(self, run, devices):
        started.append(Job())
        os.kill(os.getpid(), signal.SIGTERM)  # between the run's start and its record here
        return started[-1]

    monkeypatch.setattr(Runner, "_job", job)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        runner = Runner(plan, "cpu", ["", ""], "c", SimpleNamespace())
        runner.stop_on_signals()
        with pytest.raises(Stopped, match="SIGTERM"):
            runner.run()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    assert [job.terminated for job in started] == [True]  # and no second run started
    (record,) = plan.records.values()
    assert record["status"].startswith("failed: ") and record["commits"] == ["c"]
    assert record["machine"]["torch"]


def test_cheap_runs_are_first_and_sizes_can_be_chosen(tmp_path):
    text = TOML + "\n[sizes.b]\ndim = 8\nffn_dim = 16\nn_layers = 1\nn_heads = 2\n"
    (tmp_path / "x.toml").write_text(text)
    experiment = read_experiment(str(tmp_path / "x.toml"))
    assert [r.size for r in Plan(experiment, tmp_path / "w").missing()] == ["b", "b", "a", "a"]
    assert [r.size for r in Plan(experiment, tmp_path / "w", ["a"]).missing()] == ["a", "a"]
    with pytest.raises(module.ConfigError, match="--sizes: got 'z', expected some of a, b"):
        Plan(experiment, tmp_path / "w", ["z"])
