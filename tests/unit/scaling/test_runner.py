# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How the runs of an experiment start, fail and stop; whole runs are in tests/integration."""

import os
import signal
from types import SimpleNamespace

import pytest

from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.scaling import runner as module
from torchtitan_lr.scaling.experiment import read_experiment
from torchtitan_lr.scaling.experiments import Stopped
from torchtitan_lr.scaling.plan import Plan
from torchtitan_lr.scaling.report import plan_rows, plan_text
from torchtitan_lr.scaling.runner import Runner

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


def test_as_many_runs_at_once_as_there_are_slots(plan, monkeypatch):
    """Two slots: a third run starts when one of the first two has ended, in its slot."""
    active, most, devices = [], [], []

    class Short(Job):
        def __init__(self):
            super().__init__()
            self.asked = 0
            active.append(self)
            most.append(len(active))

        def ended(self):
            self.asked += 1
            return self.asked > 3

        def finish(self):
            active.remove(self)
            raise RunFailedError("no run")

    def job(self, run, names):
        devices.append(names)
        return Short()

    monkeypatch.setattr(Runner, "_job", job)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0)
    plan.experiment.seeds[:] = [0, 1, 2, 3, 4]
    runner = Runner(plan, "cuda", ["0", "1"], "c", SimpleNamespace())
    runner.run()
    assert len(most) == 5 == len(runner.failed) and max(most) == 2
    assert set(devices) == {"0", "1"}


def test_a_cpu_runs_as_many_at_once_as_it_has_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert [len(module.slots_of(0, ranks, "cpu", 0)) for ranks in (1, 2, 16)] == [8, 4, 1]
    assert len(module.slots_of(3, 1, "cpu", 0)) == 3


def test_every_run_is_of_one_wandb_group(tmp_path):
    text = TOML.replace("[1e-3]", "[1e-3, 2e-3, 4e-3]")
    (tmp_path / "x.toml").write_text(text)
    runs = Plan(read_experiment(str(tmp_path / "x.toml")), tmp_path / "w")
    searched = [run for run in runs.runs() if run.rate is not None]
    names = set()
    for run in searched:
        arguments = runs.arguments(run)
        assert "--metrics.wandb_group=x" in arguments
        assert f"--metrics.wandb_tags=full,a,tokens_per_parameter_0.01,seed_{run.seed}" in arguments
        names |= {argument for argument in arguments if "wandb_run_name" in argument}
    assert len(names) == len(searched) == 3


def test_a_plan_lists_flops_bytes_and_time(plan):
    """By hand: FLOPs per token times tokens; bytes of no layout of one rank; time by a rate."""
    (row,) = plan_rows(plan, rate=1e6)
    run = plan.missing()[0]
    cost = plan.costs["full", "a"]
    assert row["flops"] == cost.flops_per_token * cost.tokens_per_step * plan.steps(run)
    assert row["expected_seconds"] == row["flops"] / 1e6 and row["bytes"] == 0
    text = plan_text(plan, [row | {"bytes": 3.5e6}], 2, "stated")
    assert "FLOPs per run" in text and "MB per run" in text and " 3.5 " in text
    assert f"2 runs to do, {2 * row['flops']:.3g} FLOPs" in text
    assert f"{2 * row['expected_seconds'] / 2 / 3600:.2f} h expected with 2 at once" in text
