# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How many machines a run may have."""

from dataclasses import replace

import pytest

from tests.commands import ROOT
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch import machines
from torchtitan_lr.launch.environment import Environment, read_environment

TWO_TO_FOUR = Environment(1, 4, "0", "", "m", min_nodes=2, max_restarts=1)
BATCH = "--training.global_batch_size"


@pytest.fixture
def config(monkeypatch, tmp_path):
    """The main job without tensor parallelism, whose ranks all read data."""
    monkeypatch.chdir(tmp_path)  # where no earlier run lies
    file = f"--job.config_file={ROOT}/train_configs/debug_cola.toml"

    def build(*arguments):
        one = ["--parallelism.tensor_parallel_degree=1", "--training.local_batch_size=1"]
        return build_job_config([file, *one, *arguments])

    return build


def test_a_range_of_machines(monkeypatch):
    monkeypatch.setenv("RDZV_ENDPOINT", "host:1")
    for text, least, most in (("2:4", 2, 4), ("3:3", None, 3), ("4", None, 4)):
        monkeypatch.setenv("NNODES", text)
        found = read_environment()
        assert (found.min_nodes, found.nodes) == (least, most)
        assert found.nodes_text == text.replace("3:3", "3")


def test_every_number_of_machines_must_fit(config):
    machines.check_machines(config(f"{BATCH}=12"), TWO_TO_FOUR, "cpu")
    with pytest.raises(ConfigError) as told:
        machines.check_machines(config(f"{BATCH}=8"), TWO_TO_FOUR, "cpu")
    want = "NNODES: got '2:4', expected only numbers of machines that fit; 3 of 1 ranks: training."
    assert str(told.value).startswith(want) and "\n" not in str(told.value)
    # Without the third it fits.
    machines.check_machines(config(f"{BATCH}=8"), replace(TWO_TO_FOUR, min_nodes=4), "cpu")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([f"{BATCH}=-1"], r"global_batch_size: got -1, .* with NNODES=2:4: -1 depends on"),
        ([f"{BATCH}=12", "--checkpoint.no_enable"], r"checkpoint.enable: .* MAX_RESTARTS=1"),
        (
            [f"{BATCH}=12", "--checkpoint.load_only"],
            r"load_only: got True, expected false with MAX",
        ),
        ([f"{BATCH}=12", "--checkpoint.load_step=3"], r"load_step: got 3, expected -1 with MAX"),
    ],
)
def test_what_could_not_go_on(config, arguments, told):
    with pytest.raises(ConfigError, match=told):
        machines.check_machines(config(*arguments), TWO_TO_FOUR, "cpu")
    # One start of a fixed number of machines may be so; it looks for the step by itself.
    if "load_step" not in told:
        one_start = replace(TWO_TO_FOUR, min_nodes=None, max_restarts=0)
        machines.check_machines(config(*arguments), one_start, "cpu")
