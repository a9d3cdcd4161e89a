# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the launcher refuses, and what it would start; its processes are in tests/integration."""

import os
from types import SimpleNamespace

import pytest

from tests.commands import ROOT
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.compat.elastic import Failure
from torchtitan_lr.launch import launcher as launch
from torchtitan_lr.launch.folder_lock import locked


@pytest.fixture
def variables(monkeypatch):
    for name in ("NGPU", "NNODES", "LOG_RANK", "COMM_MODE", "RDZV_ENDPOINT", "TRAIN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CONFIG_FILE", "MAX_RESTARTS", "RDZV_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


REFUSED_VARIABLES = [
    ({"NGPU": "many"}, "NGPU: got 'many', expected a number from 1 to 1,024"),
    ({"LOG_RANK": "4"}, "LOG_RANK: got '4', expected ranks from 0 to 3 such as 0,1"),
    (
        {"NNODES": "2", "RDZV_ENDPOINT": "a:1,b:1"},
        "RDZV_ENDPOINT: got 'a:1,b:1', expected host:port of one of the 2 machines",
    ),
    ({"NNODES": "2"}, "RDZV_ENDPOINT: got '', expected host:port of one of the 2 machines"),
    ({"NNODES": "0:2"}, "NNODES: got '0', expected a number from 1 to 100,000"),
    ({"RDZV_CONF": "join_timeout=1s"}, "RDZV_CONF: got 'join_timeout=1s', expected KEY=NUMBER"),
]


@pytest.mark.parametrize(("values", "expected"), REFUSED_VARIABLES)
def test_refused_variables(variables, capsys, values, expected):
    for name, value in values.items():
        variables.setenv(name, value)
    assert launch.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {expected}")
    assert len(captured.err.splitlines()) == 1


def test_a_start_that_is_refused_names_the_job_in_its_folder(variables, capsys, tmp_path):
    step = tmp_path / "checkpoint/step-9"
    step.mkdir(parents=True)
    Record({key: {} for key in ("model", "train_state", "optimizer", "dataloader")}).write(step)
    arguments = [f"{ROOT}/train_configs/debug_cola.toml", f"--job.dump_folder={tmp_path}"]
    arguments += ["--training.steps=6"]
    assert launch.main(arguments) == 2
    assert "training.steps: got 6, expected at least 9, the step of " in capsys.readouterr().err
    with locked(str(tmp_path)):
        assert launch.main(arguments) == 2
    assert f"process {os.getpid()} on " in capsys.readouterr().err


def test_refused_arguments(variables, capsys, tmp_path):
    variables.chdir(ROOT)
    arguments = [f"--job.dump_folder={tmp_path}/new", "--training.steps=ten"]
    assert launch.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == ("error: training.steps: got 'ten', expected an integer such as 10000\n")
    assert not (tmp_path / "new").exists()


def test_environment(variables):
    default = launch.Environment(4, 1, "0", "", "torchtitan_lr.train", ranks_given=False)
    assert launch.read_environment() == default
    variables.setenv("NGPU", "")
    assert launch.read_environment() == default
    variables.setenv("NGPU", "8")
    variables.setenv("LOG_RANK", "0, 7")
    variables.setenv("NNODES", "2")
    variables.setenv("RDZV_ENDPOINT", "host:1234")
    environment = launch.read_environment()
    two = launch.Environment(8, 2, "0,7", "", "torchtitan_lr.train", endpoint="host:1234")
    assert environment == two
    assert environment.world_size == 16
    variables.setenv("COMM_MODE", "fake_backend")
    variables.setenv("MAX_RESTARTS", "3")
    dry = launch.Environment(16, 1, "0,7", "fake_backend", "torchtitan_lr.train")
    assert launch.read_environment() == dry


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("debug_cole", "job.config_file: got 'debug_cole', expected a TOML file such as "),
        ("training.steps=3", "command line: got 'training.steps=3', expected --section.key=value"),
    ],
)
def test_a_first_word_that_names_nothing_is_refused(variables, capsys, word, refused):
    assert launch.main([word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {refused}") and said.count("\n") == 1
    assert ("did you mean debug_cola" in said) == (word == "debug_cole")


def test_how_to_go_on(tmp_path):
    checkpoint = SimpleNamespace(folder="checkpoint", enable=True)
    config = SimpleNamespace(checkpoint=checkpoint, job=SimpleNamespace(dump_folder=str(tmp_path)))
    assert launch.how_to_resume(config) == "; there is no checkpoint to resume from"
    for step, complete in ((2, True), (4, True), (6, False)):
        folder = tmp_path / f"checkpoint/step-{step}"
        folder.mkdir(parents=True)
        if complete:
            Record().write(folder)
    assert launch.how_to_resume(config).endswith(f"resume from {tmp_path}/checkpoint/step-4")
    checkpoint.enable = False
    config.job.dump_folder = str(tmp_path / "removed")
    line = launch.failure_line(Failure(1, 1, "its words", tmp_path), config)
    assert line.startswith(f"error: rank 1 failed: its words; its output: {tmp_path}; there is no")
    assert launch.how_to_resume(config) == "; there is no checkpoint to resume from"
